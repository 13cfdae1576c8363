"""vLLM's draft model as tree growth runs it: over its part of vLLM's paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables

from sequoia_vllm.drafting.block_growth import BlockLogits, BlockModel
from sequoia_vllm.drafting.growth import DraftModel, DraftQueries, DraftStates
from sequoia_vllm.engine.v2.attention.backend import TreeBackend
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables

Forward = Callable[[Tensor, Tensor, dict[str, Any], dict[str, Tensor], Tensor | None], DraftStates]
"""(token ids, positions, attention metadata, slots by layer, feedback) -> states."""


@dataclass(frozen=True)
class DraftCache:
    """The draft's part of the paged KV cache.

    Attributes:
        block_tables: vLLM's, gathered for the batch by the target's pass.
        groups: Index of the cache group of each draft layer.
        windows: Tokens that the layers of a group see, of groups that do not see all.
        slot_mappings: int64 ``[groups, rows]``: a buffer of the draft's own.
    """

    block_tables: BlockTables
    groups: dict[str, int]
    windows: dict[int, int]
    slot_mappings: Tensor

    def slots(
        self, requests: Tensor, query_start_loc: Tensor, positions: Tensor, has_slot: Tensor
    ) -> Tensor:
        """Slots int64 ``[groups, rows]`` of these positions; -1 where there is none.

        Args:
            requests: int64 ``[R]``: request slots; -1: none.
            query_start_loc: int32 ``[R + 1]``: rows of each request.
            positions: ``[rows]``.
            has_slot: bool ``[rows]``.
        """
        slots = self.block_tables.compute_slot_mappings(
            requests,
            query_start_loc,
            torch.where(has_slot, positions, 0).long(),
            len(positions),
            out=self.slot_mappings,
        )
        return slots.masked_fill_(~has_slot, PAD_SLOT_ID)

    def leave_out_before_windows(self, slots: Tensor, positions: Tensor, computed: Tensor) -> None:
        """Gives no slots, in place, to what no token to come sees: its blocks may be another's.

        vLLM takes them away when the target has no more use for them, whether or not the
        draft has read that far.

        Args:
            slots: int64 ``[groups, rows]``, from `slots`.
            positions: ``[rows]``.
            computed: ``[rows]``: tokens that the target had computed of each one's request
                before the step.
        """
        for group, window in self.windows.items():
            slots[group].masked_fill_(positions < computed - window + 1, PAD_SLOT_ID)

    def by_layer(self, slots: Tensor) -> dict[str, Tensor]:
        """Each draft layer's row of such slots."""
        return {name: slots[group] for name, group in self.groups.items()}

    def inputs(self, max_requests: int) -> DraftInputs:
        """Buffers for passes with as many rows per request, as many rows as slots."""
        tables = PagedTables.of(self.block_tables.input_block_tables, self.block_tables.block_sizes)
        return DraftInputs.empty(tables, self.slot_mappings.shape[1], max_requests)


@dataclass(frozen=True)
class CachedDraftModel(DraftModel):
    """The draft, its cache, and the device's attention over it.

    Attributes:
        cache: The draft's cache.
        backend: The device's attention.
        run: Runs the draft model in vLLM's forward context.
        head: Its LM head.
        of_target: What it reads of states of the target.
    """

    cache: DraftCache
    backend: TreeBackend
    run: Forward
    head: Callable[[Tensor], Tensor]
    of_target: Callable[[Tensor], Tensor]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        queries: DraftQueries,
        feedback: Tensor | None = None,
    ) -> DraftStates:
        """See `DraftModel.forward`; layers of a cache group share their attention metadata."""
        metadata = self._metadata_of(queries, slots, self.cache.groups)
        return self.run(token_ids, positions, metadata, self.cache.by_layer(slots), feedback)

    def _metadata_of(
        self, queries: DraftQueries, slots: Tensor, groups: dict[str, int]
    ) -> dict[str, Any]:
        """Of layers, whose cache groups these are."""
        tables = self.cache.block_tables.input_block_tables
        num_reqs = len(queries.context_lens)
        by_group = {
            group: self.backend.draft_metadata(queries, tables[group][:num_reqs], slots[group])
            for group in set(groups.values())
        }
        return {name: by_group[group] for name, group in groups.items()}

    def feedback_of(self, target_states: Tensor) -> Tensor:
        """See `DraftModel.feedback_of`."""
        return self.of_target(target_states)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftModel.compute_logits`."""
        return self.head(hidden)


@dataclass(frozen=True)
class CachedBlockModel(CachedDraftModel, BlockModel):
    """A DFlash head, its cache, and the device's attention over it.

    Attributes:
        store: See `BlockModel.store_context`.
        logits: See `BlockModel.block_logits`.
        causal: Layers whose positions see none after their own...
        chain: ...which bool ``[I, I]`` says of them.
    """

    store: Callable[[Tensor, Tensor, Tensor], None]
    logits: Callable[[Tensor, Tensor, Tensor], BlockLogits]
    causal: frozenset[str]
    chain: Tensor

    def _metadata_of(
        self, queries: DraftQueries, slots: Tensor, groups: dict[str, int]
    ) -> dict[str, Any]:
        """Of causal layers the block is a chain."""
        chain = {name: group for name, group in groups.items() if name in self.causal}
        block = {name: group for name, group in groups.items() if name not in self.causal}
        as_chain = replace(queries, ancestors=self.chain)
        return {
            **super()._metadata_of(queries, slots, block),
            **super()._metadata_of(as_chain, slots, chain),
        }

    def store_context(self, states: Tensor, positions: Tensor, slots: Tensor) -> None:
        """See `BlockModel.store_context`."""
        self.store(states, positions, slots)

    def block_logits(self, hidden: Tensor, context: Tensor, roots: Tensor) -> BlockLogits:
        """See `BlockModel.block_logits`."""
        return self.logits(hidden, context, roots)
