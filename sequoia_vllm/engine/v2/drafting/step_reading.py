"""How much of each request a trained head has read: what the target has computed, no less.

A head reads a committed token with the target's hidden states at the token before it. They
are there in the step that computes them and never again, so it reads in every step, drafts or
not, and what the prefix cache keeps it has read, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sequoia_vllm.engine.v2.drafting.request_reading import RequestReading


class StepReading(RequestReading):
    """Follows the requests of an engine whose head reads in every step."""

    def __init__(self, max_num_reqs: int, depths: Sequence[int], device: torch.device) -> None:
        super().__init__(max_num_reqs, depths, device)
        self._bounds = np.zeros(max_num_reqs, dtype=np.int32)

    def use_cache(self, block_sizes: Mapping[int, int]) -> None:
        """Nothing: blocks have what the head read of them when the target computed them."""

    def start(
        self, slot: int, num_computed_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """See `RequestReading.start`.

        Of the prefix cache vLLM takes one block less for a head, whose last entry comes with a
        token of the next block.
        """
        self._read.stage_write_elem(slot, num_computed_tokens)

    def extend(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Nothing: see `use_cache`."""

    def gain(
        self,
        slots: NDArray[np.intp],
        computed: NDArray[np.int32],
        num_scheduled: NDArray[np.int32],
        num_drafts: NDArray[np.int32] | None,
        is_prefilling: NDArray[np.bool_],
    ) -> None:
        """See `RequestReading.gain`: what the target may have computed for good in this step."""
        drafts = np.zeros_like(num_scheduled) if num_drafts is None else num_drafts
        self._bounds[slots] = num_scheduled - drafts + self._depths[drafts]

    def most_unread(self, slots: NDArray[np.intp]) -> int:
        """See `RequestReading.most_unread`."""
        return int(self._bounds[slots].max())

    def take_bounds(self, slots: NDArray[np.intp], budget: int) -> NDArray[np.int32]:
        """See `RequestReading.take_bounds`.

        They are no more than the target's rows of the step, and so within any ``budget``.
        """
        self._read.apply_write()
        return self._bounds[slots]
