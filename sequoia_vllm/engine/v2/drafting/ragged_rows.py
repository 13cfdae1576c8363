"""The rows of a pass that reads a different number of tokens of each request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.engine.v2.drafting.draft_cache import DraftCache


@dataclass(frozen=True)
class RaggedRows:
    """Rows of R requests, one request after another, then padding.

    Only the device knows how many tokens a request reads. Padding at the end, not within each
    request, keeps attention from positions that nobody wrote.

    Attributes:
        requests: int64 ``[rows]``: the batch index of each row's request; any for padding.
        offsets: int32 ``[rows]``: index of the row's token among those that the request reads.
        positions: int64 ``[rows]``: position of the row's token.
        slots: int64 ``[groups, rows]``: where keys and values go; -1: nowhere.
        first: int32 ``[R + 1]``: first row of each request, then of the padding.
        most_np: int32 ``[R + 1]``: the same, if each request had its most possible rows.
        last: int32 ``[R]``: see `last_rows`.
    """

    requests: Tensor
    offsets: Tensor
    positions: Tensor
    slots: Tensor
    first: Tensor
    most_np: NDArray[np.int32]
    last: Tensor

    @classmethod
    def of(
        cls, batch: InputBatch, bounds: NDArray[np.int32], read: DraftBatch, cache: DraftCache
    ) -> RaggedRows:
        """Rows of a batch.

        Args:
            batch: R requests.
            bounds: int32 ``[R]``: most rows of each request; not all 0.
            read: Gives ``starts`` and ``counts`` of the tokens that they read.
            cache: The draft's.
        """
        num_reqs = batch.num_reqs
        starts, counts = read.starts[:num_reqs], read.counts[:num_reqs]
        most_np = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(bounds, out=most_np[1:])
        total = int(most_np[-1])
        first = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        rows = torch.arange(total, dtype=torch.int32, device=first.device)
        requests = torch.searchsorted(first[1:], rows, right=True).clamp_(max=num_reqs - 1)
        offsets = rows - first[requests]
        positions = (starts[requests] + offsets).long()
        slots = cache.slots(batch.idx_mapping, first, positions, offsets < counts[requests])
        if cache.windows:
            # Before this step: vLLM frees blocks only by what finished steps have computed.
            computed = batch.seq_lens[:num_reqs] - batch.query_start_loc[: num_reqs + 1].diff()
            cache.leave_out_before_windows(slots, positions, computed[requests])
        last = last_rows(first, counts, total)
        return cls(requests, offsets, positions, slots, first, most_np, last)


def last_rows(first_rows: Tensor, counts: Tensor, total: int) -> Tensor:
    """The row of each request's last token, int32 ``[R]``; any row for one that reads nothing.

    Args:
        first_rows: int32 ``[R + 1]``: first row of each request, perhaps past the last row if it
            reads nothing.
        counts: int32 ``[R]``: tokens that each request reads.
        total: Rows of all requests, at least 1.
    """
    return (first_rows[:-1] + counts - 1).clamp(min=0, max=total - 1)
