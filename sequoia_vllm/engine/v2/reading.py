"""How much of each request the draft model has read: exact on the device, bounded on the host.

A step's outcome stays on the device (vLLM schedules the next step before it is
known), so the host knows only how many tokens a request may have gained at
most. That bounds the rows of the draft's next pass; the device knows which of
them are real.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor


class DraftReading:
    """Tokens of each request whose keys and values the draft's cache holds.

    While a schedule says 0 drafts the draft reads nothing; when speculation is
    on again, requests catch up.

    Args:
        max_num_reqs: Request slots of the engine.
        depths: Most drafts that a step accepts of 0, 1, 2, ... of them.
        device: The engine's device.
    """

    def __init__(self, max_num_reqs: int, depths: Sequence[int], device: torch.device) -> None:
        self._depths = np.array(depths, dtype=np.int32)
        self._read = StagedWriteTensor(max_num_reqs, dtype=torch.int32, device=device)
        self._unread_bound = np.zeros(max_num_reqs, dtype=np.int32)

    @property
    def read(self) -> Tensor:
        """int32 ``[max_num_reqs]``: tokens read, by request slot; a drafting pass adds to it."""
        return self._read.gpu

    def start(self, slot: int, num_computed_tokens: int) -> None:
        """A request (re)starts with this many tokens in the cache, by prefix caching."""
        self._read.stage_write_elem(slot, num_computed_tokens)
        self._unread_bound[slot] = 0

    def apply_starts(self) -> None:
        """Writes what `start` was told to the device."""
        self._read.apply_write()

    def gain(
        self,
        slots: NDArray[np.intp],
        num_scheduled: NDArray[np.int32],
        num_drafts: NDArray[np.int32] | None,
        is_prefilling: NDArray[np.bool_],
    ) -> None:
        """A step was run: each request may have gained up to so many tokens.

        Args:
            slots: ``[R]``: request slots of the batch.
            num_scheduled: ``[R]``: tokens in the target's forward, drafts included.
            num_drafts: ``[R]``, or None for none.
            is_prefilling: ``[R]``: whether the step read a prompt (it may have
                sampled a token too).
        """
        drafts = np.zeros_like(num_scheduled) if num_drafts is None else num_drafts
        read = num_scheduled - drafts + is_prefilling
        self._unread_bound[slots] += read + self._depths[drafts]

    def most_unread(self, slots: NDArray[np.intp]) -> int:
        """Tokens that the draft may have to read of one of these requests."""
        return int(self._unread_bound[slots].max())

    def take_bounds(self, slots: NDArray[np.intp], budget: int) -> NDArray[np.int32]:
        """Rows to read now, int32 ``[R]``: all there may be, up to ``budget`` in sum."""
        bounds = self._unread_bound[slots]
        allowed = np.maximum(budget - (bounds.cumsum() - bounds), 0)
        taken: NDArray[np.int32] = np.minimum(bounds, allowed).astype(np.int32)
        self._unread_bound[slots] = bounds - taken
        return taken
