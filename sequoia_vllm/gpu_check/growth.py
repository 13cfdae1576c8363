"""A draft model that grows trees, as the engine's does; all of it can be one CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia_vllm.gpu_check.drafts import DraftedBatch
from sequoia_vllm.gpu_check.llama import Llama, Nodes
from sequoia_vllm.gpu_check.paged import PagedCache


class TreeGrower:
    """Reads what was committed last, then grows level by level.

    Attributes:
        batch: What is grown.
        read: int64 ``[R, D + 1]``: the last committed tokens, the root last. They are
            read again where they were read before: the newest are never more.

    Args:
        model: The draft.
        cache: Its cache.
        batch: The requests; roots are at position D at least.
    """

    def __init__(self, model: Llama, cache: PagedCache, batch: DraftedBatch) -> None:
        self.batch = batch
        self._model = model
        self._cache = cache
        depth = batch.tables.tree.depth
        self.read = torch.zeros_like(batch.sampled)
        self._starts = torch.zeros_like(batch.roots)
        self._chain = Nodes.chain(self._starts, depth + 1)
        levels = batch.tables.levels
        self._nodes = [
            Nodes.of(batch.roots, level.first, level.width, levels.depths, levels.ancestors)
            for level in levels.levels
        ]

    def read_committed(self) -> Tensor:
        """Hidden states ``[R, H]`` of the roots."""
        width = self._chain.width
        torch.sub(self.batch.roots, width - 1, out=self._starts)
        hidden = self._model.forward(self.read.view(-1), self._chain, self._cache)
        return hidden.view(self.batch.num_reqs, width, -1)[:, -1]

    def draw_below_roots(self, hidden: Tensor) -> None:
        """The children of the roots."""
        self.batch.draw(self.batch.tables.levels.levels[0], self._model.logits(hidden))

    def grow_level(self, number: int) -> None:
        """One forward pass over a level's nodes, and their children."""
        level = self.batch.tables.levels.levels[number]
        tokens = self.batch.tokens.index_select(1, level.nodes)
        hidden = self._model.forward(tokens.view(-1), self._nodes[number], self._cache)
        self.batch.draw(level, self._model.logits(hidden))

    def grow(self) -> None:
        """A whole drafting pass."""
        self.draw_below_roots(self.read_committed())
        for number in range(1, len(self._nodes)):
            self.grow_level(number)
