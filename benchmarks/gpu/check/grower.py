"""The engine's tree growth over a draft of Llama's shape; all of it can be one CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.check.llama import Llama, Nodes
from benchmarks.gpu.check.paged import BLOCK_SIZE, PagedCache
from benchmarks.gpu.check.tree_batch import TreeBatch
from sequoia_vllm.drafting.draft_plan import level_widths
from sequoia_vllm.drafting.growth import (
    DraftModel,
    DraftQueries,
    DraftStates,
    TreeGrowth,
    chain_width,
)
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables
from sequoia_vllm.kernels.tree_attention import NodeMasks


class LlamaDraft(DraftModel):
    """A model and its cache, as growth runs them.

    Args:
        model: The draft.
        cache: Its cache, the only group of layers.
    """

    def __init__(self, model: Llama, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._masks = NodeMasks()

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        queries: DraftQueries,
        recurrent_states: Tensor | None = None,
    ) -> DraftStates:
        """See `DraftModel.forward`."""
        nodes = Nodes(
            context_lens=queries.context_lens,
            query_start_loc=queries.query_start_loc,
            first=queries.first,
            width=queries.width,
            mask=self._masks.of(queries.ancestors),
        )
        hidden = self._model.forward(token_ids, positions, slots[0], nodes, self._cache)
        return DraftStates(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftModel.compute_logits`."""
        return self._model.logits(hidden)


class TreeGrower:
    """Reads what was committed last, then grows level by level.

    Attributes:
        batch: What is grown.
        token_ids: int32 ``[R, positions]``: committed tokens of each request, the root
            last. The last D + 1 are read in every pass, again where they were read
            before: the newest are never more.

    Args:
        model: The draft.
        cache: Its cache.
        batch: The requests; roots are at position D at least.
    """

    def __init__(self, model: Llama, cache: PagedCache, batch: TreeBatch) -> None:
        self.batch = batch
        self._levels = batch.tables.levels
        depth, requests = batch.tables.tree.depth, batch.num_reqs
        widest = max(depth + 1, *level_widths(batch.tables.tree))
        tables = PagedTables.of([cache.block_table], [BLOCK_SIZE])
        shape = (requests, cache.positions)
        self.token_ids = torch.zeros(shape, dtype=torch.int32, device=model.device)
        self._growth = TreeGrowth(
            batch=batch.requests,
            drafted=batch.drafted,
            model=LlamaDraft(model, cache),
            inputs=DraftInputs.empty(tables, requests * widest, requests),
            token_ids=self.token_ids,
            max_lens=(cache.positions, cache.positions),
            depth=depth,
        )
        self._most_keys = cache.positions

    def read_committed(self) -> DraftStates:
        """States of the roots, R rows."""
        requests = self.batch.requests
        torch.sub(requests.roots, self.batch.tables.tree.depth, out=requests.starts)
        self._growth.read_committed(self.batch.num_reqs, chain_width(self._levels), self._most_keys)
        return self._growth.roots(self.batch.num_reqs)

    def draw_below_roots(self, roots: DraftStates) -> None:
        """The children of the roots."""
        self._growth.draw_below_roots(self.batch.num_reqs, self._levels, roots)

    def grow_level(self, number: int) -> None:
        """One forward pass over a level's nodes, and their children."""
        level = self._levels.levels[number]
        self._growth.grow_level(self.batch.num_reqs, self._levels, level, self._most_keys)

    def grow(self) -> None:
        """A whole drafting pass."""
        self.read_committed()
        self._growth.grow(self.batch.num_reqs, self._levels, self._most_keys)
