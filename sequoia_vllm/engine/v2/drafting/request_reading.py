"""What a proposer asks of whatever follows how much of each request its draft has read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor


class RequestReading(ABC):
    """Follows how many tokens of each request the draft has read.

    Before the target's forward, the runner calls `start` for requests that begin or resume
    and `extend` for those that get more cache blocks. After every step the proposer calls
    `gain`; if the draft is to read it then asks `most_unread`, which decides how it reads,
    and calls `take_bounds` for the rows of its pass. That pass adds to `read` on the device
    what it has really read.

    Args:
        max_num_reqs: How many request slots the engine has.
        depths: The most drafts that a step can accept if it scores 0, 1, 2, ... of them.
        device: The engine's device.
    """

    def __init__(self, max_num_reqs: int, depths: Sequence[int], device: torch.device) -> None:
        self._depths = np.array(depths, dtype=np.int32)
        self._read = StagedWriteTensor(max_num_reqs, dtype=torch.int32, device=device)

    @property
    def read(self) -> Tensor:
        """int32 ``[max_num_reqs]``: tokens read, by request slot; written by drafting passes."""
        return self._read.gpu

    @abstractmethod
    def use_cache(self, block_sizes: Mapping[int, int]) -> None:
        """Called when the KV cache is allocated; for its block sizes see `DraftBlocks`."""

    @abstractmethod
    def start(
        self, slot: int, num_computed_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """A request begins, or resumes after preemption.

        Args:
            slot: Its request slot.
            num_computed_tokens: How many of its first tokens are in the prefix cache, so
                that the target does not compute them.
            block_ids: The ids of its blocks, for each cache group.
        """

    @abstractmethod
    def extend(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        """The request in this slot gets more blocks, whose ids are given for each cache group."""

    @abstractmethod
    def gain(
        self,
        slots: NDArray[np.intp],
        computed: NDArray[np.int32],
        num_scheduled: NDArray[np.int32],
        num_drafts: NDArray[np.int32] | None,
        is_prefilling: NDArray[np.bool_],
    ) -> None:
        """Notes how many tokens each request of a step may have gained at most.

        Args:
            slots: ``[R]``: the request slots of the batch.
            computed: ``[R]``: tokens in the target's cache before the step, as the
                scheduler counts them.
            num_scheduled: ``[R]``: tokens in the target's forward, drafts included.
            num_drafts: ``[R]``: drafts in the target's forward; None if there were none.
            is_prefilling: ``[R]``: whether the step read a prompt (it may have
                sampled a token too).
        """

    @abstractmethod
    def most_unread(self, slots: NDArray[np.intp]) -> int:
        """Tokens that the draft may have to read of one of these requests."""

    @abstractmethod
    def take_bounds(self, slots: NDArray[np.intp], budget: int) -> NDArray[np.int32]:
        """Rows to read now, int32 ``[R]``: all there may be, up to ``budget`` in sum."""
