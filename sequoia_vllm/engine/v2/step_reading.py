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
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor


class StepReading:
    """Follows the requests of an engine whose head reads in every step.

    It is asked as `DraftReading` is, in the same order.

    Args:
        max_num_reqs: How many request slots the engine has.
        depths: The most drafts that a step can accept if it scores 0, 1, 2, ... of them.
        device: The engine's device.
    """

    def __init__(self, max_num_reqs: int, depths: Sequence[int], device: torch.device) -> None:
        self._depths = np.array(depths, dtype=np.int32)
        self._read = StagedWriteTensor(max_num_reqs, dtype=torch.int32, device=device)
        self._bounds = np.zeros(max_num_reqs, dtype=np.int32)

    @property
    def read(self) -> Tensor:
        """int32 ``[max_num_reqs]``: tokens read, by request slot; written by drafting passes."""
        return self._read.gpu

    def use_cache(self, block_sizes: Mapping[int, int]) -> None:
        """Nothing: blocks have what the head read of them when the target computed them."""

    def start(
        self, slot: int, num_computed_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """A request begins, or resumes after preemption.

        Args:
            slot: Its request slot.
            num_computed_tokens: How many of its first tokens are in the prefix cache. vLLM
                takes one block less from it for a head, whose last entry comes with a token
                of the next block.
            block_ids: Not used.
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
        """Notes how many tokens of each request of a step the target may have computed for good.

        Args:
            slots: ``[R]``: the request slots of the batch.
            computed: Not used.
            num_scheduled: ``[R]``: tokens in the target's forward, drafts included.
            num_drafts: ``[R]``: drafts in the target's forward; None if there were none.
            is_prefilling: Not used.
        """
        drafts = np.zeros_like(num_scheduled) if num_drafts is None else num_drafts
        self._bounds[slots] = num_scheduled - drafts + self._depths[drafts]

    def most_unread(self, slots: NDArray[np.intp]) -> int:
        """Tokens that the head may have to read of one of these requests."""
        return int(self._bounds[slots].max())

    def take_bounds(self, slots: NDArray[np.intp], budget: int) -> NDArray[np.int32]:
        """Rows to read now, int32 ``[R]``: all there may be.

        They are no more than the target's rows of the step, and so within any ``budget``.
        """
        self._read.apply_write()
        return self._bounds[slots]
