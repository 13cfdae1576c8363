"""The rows of a pass that reads prompts: as many of each request as it may need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.engine.v2.draft_model import DraftCache


@dataclass(frozen=True)
class RaggedRows:
    """Rows of R requests, one request after another.

    Attributes:
        requests: int64 ``[rows]``: each row's request, as a place in the batch.
        offsets: int32 ``[rows]``: its token, of those that the request reads.
        positions: int64 ``[rows]``: that token's.
        slots: int64 ``[groups, rows]``: where keys and values go; -1: nowhere, as the request
            has no such token.
        first, first_np: int32 ``[R + 1]``: first row of each request.
        last: int32 ``[R]``: see `last_rows`.
    """

    requests: Tensor
    offsets: Tensor
    positions: Tensor
    slots: Tensor
    first: Tensor
    first_np: NDArray[np.int32]
    last: Tensor

    @classmethod
    def of(
        cls, batch: InputBatch, bounds: NDArray[np.int32], reading: DraftBatch, cache: DraftCache
    ) -> RaggedRows:
        """Those of a batch.

        Args:
            batch: R requests.
            bounds: int32 ``[R]``: rows of each; there is one at least.
            reading: What of it they read.
            cache: The draft's.
        """
        num_reqs, device = batch.num_reqs, batch.idx_mapping.device
        starts, counts = reading.starts[:num_reqs], reading.counts[:num_reqs]
        first_np = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(bounds, out=first_np[1:])
        total = int(first_np[-1])
        requests_np = np.repeat(np.arange(num_reqs), bounds)
        offsets_np = (np.arange(total) - first_np[requests_np]).astype(np.int32)
        first = async_tensor_h2d(first_np, device=device)
        requests = async_tensor_h2d(requests_np, device=device)
        offsets = async_tensor_h2d(offsets_np, device=device)
        positions = (starts[requests] + offsets).long()
        slots = cache.slots(batch.idx_mapping, first, positions, offsets < counts[requests])
        if cache.windows:
            # The target's before this step; vLLM frees nothing by what steps under way compute.
            computed = batch.seq_lens[:num_reqs] - batch.query_start_loc[: num_reqs + 1].diff()
            cache.leave_out_before_windows(slots, positions, computed[requests])
        last = last_rows(first, counts, total)
        return cls(requests, offsets, positions, slots, first, first_np, last)


def last_rows(first_rows: Tensor, counts: Tensor, total: int) -> Tensor:
    """The row of each request's last token, int32 ``[R]``; any row for one that reads nothing.

    Args:
        first_rows: int32 ``[R + 1]``: of each request; where the budget ends, those of
            the last requests lie past the last row.
        counts: int32 ``[R]``: tokens that each request reads.
        total: Rows of all, at least 1.
    """
    return (first_rows[:-1] + counts - 1).clamp(min=0, max=total - 1)
