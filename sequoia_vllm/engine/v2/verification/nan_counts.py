"""Counts of NaN in the target's logits, for VLLM_COMPUTE_NANS_IN_LOGITS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.verification.topology import drawn_at


# Until: vLLM counts by request. Its sampler counts by row, and its output takes the first rows for
# those of the requests.
def nans_of_paths(nans_of_rows: Tensor | None, verified: Any, batch: Any) -> Tensor | None:
    """NaN of each request in the rows that plain decoding has.

    Args:
        nans_of_rows: int ``[rows]``: of each row of logits; None: nobody asks.
        verified: The batch's `Verified`.
        batch: vLLM's input batch.

    Returns:
        int ``[R]``; None where nobody asks.
    """
    if nans_of_rows is None:
        return None
    nodes = drawn_at(verified.paths[:, 1:]).long()
    is_drawn = torch.arange(nodes.shape[1], device=nodes.device) < verified.num_sampled[:, None]
    rows = batch.cu_num_logits[: len(nodes), None].long() + nodes
    return (nans_of_rows[rows] * is_drawn).sum(dim=1)
