"""How much of each request the draft has read: exact on the device, bounded on the host.

The draft *reads* a token when it computes the token's keys and values into its own KV cache. A
step's outcome stays on the device: vLLM schedules the next step before it is known. The host bounds
what a request may have gained, and so the rows of the draft's next pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from sequoia_vllm.engine.runner.draft_blocks import BlockIds, DraftBlocks

# Host buffers of staged writes. vLLM has two, one for each step under way. We need a third: a
# step drafts after the event that the host waits for, and may still read its buffer.
_BUFFERS = 3


class DraftProgress:
    """Follows how many tokens of each request the draft has read. This one is a head's.

    Before the target's forward, the runner calls `start` and `extend`. After every step the
    proposer calls `gain`. If the draft is to read, `most_unread` decides how, and `take_bounds`
    gives the rows of its pass. The pass adds the tokens that it has really read to `read`.

    A head reads in every step what the target computed. It fills a block when the target computes
    it, and needs no `DraftBlocks`. vLLM takes one block less from the prefix cache for it, as a
    block's last entry holds the next block's first token.

    Args:
        most_accepted: The most drafts that a step can accept if it scores 0, 1, 2, ... of them.

    Attributes:
        may_branch: bool ``[slots]``: whose requests may have all drafts accepted; shared.
    """

    def __init__(
        self, max_num_reqs: int, most_accepted: Sequence[int], device: torch.device
    ) -> None:
        self.may_branch = np.zeros(max_num_reqs, dtype=bool)
        self._most_accepted = np.array(most_accepted, dtype=np.int32)
        self._bounds = np.zeros(max_num_reqs, dtype=np.int32)
        # Lower bounds of the positions up to which the target has read.
        self._computed_at_least = np.zeros(max_num_reqs, dtype=np.int32)
        self._read = StagedWriteTensor(
            max_num_reqs, dtype=torch.int32, device=device, max_concurrency=_BUFFERS
        )

    @property
    def read(self) -> Tensor:
        """int32 ``[max_num_reqs]``: tokens read, by request slot; written by drafting passes."""
        return self._read.gpu

    def committed_at_least(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """The fewest committed tokens of these requests: a step commits one beyond its own."""
        return self._computed_at_least[slots] + 1

    def use_cache(self, block_sizes: Mapping[int, int]) -> None:
        """Notes the block sizes of the allocated KV cache, see `DraftBlocks`."""

    def start(
        self, slot: int, num_computed_tokens: int, block_ids: BlockIds, is_loaded: bool = False
    ) -> None:
        """Notes a request that begins, or resumes after preemption.

        Args:
            num_computed_tokens: How many of its first tokens are in the prefix cache.
            is_loaded: Whether a connector has loaded some of them.
        """
        self._read.stage_write_elem(slot, num_computed_tokens)
        self._computed_at_least[slot] = num_computed_tokens

    def extend(self, slot: int, block_ids: BlockIds) -> None:
        """Notes new blocks of the request in this slot, by their ids for each cache group."""

    def gain(self, batch: InputBatch) -> None:
        """Notes how many tokens each request of this step may have gained at most."""
        slots, certain, accepted = self._gained(batch)
        self._bounds[slots] = certain + accepted
        self._computed_at_least[slots] += certain

    def _gained(self, batch: InputBatch) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Slots, tokens that were computed, and the most accepted drafts, each ``[R]``."""
        scheduled, drafts = batch.num_scheduled_tokens, batch.num_draft_tokens_per_req
        if drafts is None:
            drafts = np.zeros_like(scheduled)
        slots = batch.idx_mapping_np
        accepted = np.where(self.may_branch[slots], drafts, self._most_accepted[drafts])
        return slots, scheduled - drafts, accepted

    def most_unread(self, slots: NDArray[np.intp]) -> int:
        """The most tokens that the draft may have to read for one of these requests."""
        return int(self._bounds[slots].max(initial=0))

    def take_bounds(
        self, slots: NDArray[np.intp], reads: NDArray[np.bool_], budget: int
    ) -> NDArray[np.int32]:
        """Rows to read now, int32 ``[R]``: all there may be; a model's up to ``budget`` in sum.

        Args:
            slots: ``[R]``.
            reads: ``[R]``: whether the draft reads a request. Once it does not, it never does.
            budget: Rows.
        """
        self._read.apply_write()
        return np.where(reads, self._bounds[slots], 0)


class ModelDraftProgress(DraftProgress):
    """Follows a draft model, which reads nothing while the schedule asks for no drafts.

    Later the requests catch up. It never reads requests that can use no tree. If another shares
    their blocks, it reads these then. It skips tokens from the prefix cache that it has read for
    another request.

    Args:
        unknown_drafts: The most drafts of a request that the scheduler counts as accepted
            before their outcome is known.
    """

    def __init__(
        self,
        max_num_reqs: int,
        most_accepted: Sequence[int],
        unknown_drafts: int,
        device: torch.device,
    ) -> None:
        super().__init__(max_num_reqs, most_accepted, device)
        self._unknown_drafts = unknown_drafts
        # Lower bounds of the positions up to which the draft has read.
        self._read_at_least = np.zeros(max_num_reqs, dtype=np.int32)
        self._blocks = DraftBlocks({})

    def use_cache(self, block_sizes: Mapping[int, int]) -> None:
        """See `DraftProgress.use_cache`."""
        self._blocks = DraftBlocks(block_sizes)

    def start(
        self, slot: int, num_computed_tokens: int, block_ids: BlockIds, is_loaded: bool = False
    ) -> None:
        """See `DraftProgress.start`."""
        self._blocks.start(slot, block_ids, num_computed_tokens, is_loaded)
        self._bounds[slot] = self._read_at_least[slot] = 0
        self._computed_at_least[slot] = num_computed_tokens

    def extend(self, slot: int, block_ids: BlockIds) -> None:
        """See `DraftProgress.extend`."""
        self._blocks.extend(slot, block_ids)

    def gain(self, batch: InputBatch) -> None:
        """See `DraftProgress.gain`."""
        slots, certain, accepted = self._gained(batch)
        is_prefilling = batch.is_prefilling_np  # a step that reads a prompt may also have sampled
        self._bounds[slots] += certain + is_prefilling + accepted
        unknown = np.where(is_prefilling, 0, self._unknown_drafts)
        at_least = batch.num_computed_tokens_np + certain - unknown
        self._computed_at_least[slots] = np.maximum(
            self._computed_at_least[slots] + certain, at_least
        )

    def most_unread(self, slots: NDArray[np.intp]) -> int:
        """See `DraftProgress.most_unread`."""
        bounds = self._bounds[slots]
        for slot, row in self._blocks.beginning(slots.tolist()).items():
            bounds[row] += self._blocks.unread(slot)[1]
        return int(bounds.max(initial=0))

    def take_bounds(
        self, slots: NDArray[np.intp], reads: NDArray[np.bool_], budget: int
    ) -> NDArray[np.int32]:
        """See `DraftProgress.take_bounds`."""
        beginning = self._blocks.beginning(slots.tolist())
        has_begun = reads.copy()
        has_begun[list(beginning.values())] = False
        for slot in [slot for slot, row in beginning.items() if not reads[row]]:
            self._read.stage_write_elem(slot, 0)  # instead of what an earlier request left
            self._blocks.begin(slot)
            del beginning[slot]
        bounds = np.where(has_begun, self._bounds[slots], 0)
        allowed = np.maximum(budget - (bounds.cumsum() - bounds), 0)
        taken: NDArray[np.int32] = np.minimum(bounds, allowed).astype(np.int32)
        self._note_read(slots[has_begun], taken[has_begun])
        left = budget - int(taken.sum())
        for slot, row in beginning.items():
            taken[row] = self._begin(slot, left)
            left -= int(taken[row])
        self._read.apply_write()
        return taken

    def _begin(self, slot: int, budget: int) -> int:
        """Rows to read now for a request that has read nothing yet; 0: it waits."""
        if budget == 0:
            self._read.stage_write_elem(slot, 0)
            return 0
        start, unread = self._blocks.unread(slot)
        self._blocks.begin(slot)
        self._read.stage_write_elem(slot, start)
        self._read_at_least[slot] = start
        self._bounds[slot] += unread
        taken = min(int(self._bounds[slot]), budget)
        self._note_read(np.array([slot]), np.array([taken], dtype=np.int32))
        return taken

    def _note_read(self, slots: NDArray[np.intp], taken: NDArray[np.int32]) -> None:
        """Notes that these slots read ``taken`` tokens, or all they have if fewer."""
        self._bounds[slots] -= taken
        before, computed = self._read_at_least[slots], self._computed_at_least[slots]
        partly = np.minimum(computed, before + taken)
        after = np.where(self._bounds[slots] == 0, computed, partly)
        self._read_at_least[slots] = after
        step = self._blocks.step
        crossed = after // step > before // step
        read = zip(*(values[crossed].tolist() for values in (slots, before, after)), strict=True)
        for slot, start, end in read:
            self._blocks.read(slot, start, end)
