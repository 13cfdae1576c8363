"""The device's work of a drafting pass: read what was committed, then grow level by level.

Everything is read from `DraftBatch` and other buffers that stay in place, and
nothing depends on values that only the device knows: a CUDA graph may hold it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.tree_tables import DraftLevels, Level
from sequoia_vllm.kernels.draft_inputs import DraftInputs


@dataclass(frozen=True)
class DraftQueries:
    """One forward pass of the draft over the same nodes of R requests' trees.

    Attributes:
        context_lens: int32 ``[R]``: tokens in the cache before node 0.
        query_start_loc: int32 ``[R + 1]``: rows of each request.
        first: The first query is this node; node j is in slot ``context + j``.
        width: Queries per request.
        ancestors: bool ``[I, I]``: which nodes each of the tree's I nodes sees.
        max_keys: No request has more keys than this.
        max_slots: Nor slots: nodes further out have none, and nobody sees them.
    """

    context_lens: Tensor
    query_start_loc: Tensor
    first: int
    width: int
    ancestors: Tensor
    max_keys: int
    max_slots: int


class DraftModel(ABC):
    """What growth needs of a draft: its forward, over its own part of a paged KV cache."""

    @abstractmethod
    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, queries: DraftQueries
    ) -> Tensor:
        """Hidden states ``[rows, H]`` of a pass, whose keys and values are kept.

        Args:
            token_ids: int32 ``[rows]``, request after request.
            positions: int64 ``[rows]``: for the model.
            slots: int64 ``[groups, rows]``: where keys and values go, by group of cache
                layers; -1: nowhere.
            queries: Which nodes these are.
        """

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, V]``: draft logits of such hidden states."""


class TreeGrowth:
    """Grows the trees of a batch.

    Args:
        batch: The requests.
        drafted: Where tokens and Q are kept.
        model: The draft.
        inputs: Buffers for what it reads.
        token_ids: int32 ``[slots, max_model_len]``: tokens of each request.
        max_lens: Longest request of the engine, and of the draft.
        depth: Of the engine's tree.
    """

    def __init__(
        self,
        batch: DraftBatch,
        drafted: DraftedTrees,
        model: DraftModel,
        inputs: DraftInputs,
        token_ids: Tensor,
        max_lens: tuple[int, int],
        depth: int,
    ) -> None:
        self._batch = batch
        self._drafted = drafted
        self._model = model
        self._inputs = inputs
        self._token_ids = token_ids
        self._max_model_len, self._draft_max_len = max_lens
        # A few new tokens are a tree without branches below what the draft has read.
        causal = torch.ones(depth + 1, depth + 1, dtype=torch.bool, device=batch.slots.device)
        self._chain = causal.tril_()

    def read_and_grow(self, num_reqs: int, levels: DraftLevels, max_keys: int) -> None:
        """A whole pass for requests with at most `chain_width` unread committed tokens.

        Args:
            num_reqs: Requests of the batch, R.
            levels: The tree to grow.
            max_keys: No request has more committed tokens.
        """
        self.grow(num_reqs, levels, self.read_committed(num_reqs, levels, max_keys), max_keys)

    def read_committed(self, num_reqs: int, levels: DraftLevels, max_keys: int) -> Tensor:
        """Reads up to `chain_width` committed tokens of each request.

        Returns:
            Hidden states ``[R, H]`` of the roots.
        """
        batch, width = self._batch, chain_width(levels)
        starts = batch.starts[:num_reqs]
        self._inputs.read_committed(
            requests=batch.slots[:num_reqs],
            starts=starts,
            counts=batch.counts[:num_reqs],
            all_token_ids=self._token_ids,
            width=width,
            longest=self._draft_max_len,
        )
        hidden = self._forward(starts, 0, width, self._chain, max_keys)
        return hidden.index_select(0, self._inputs.last_rows[:num_reqs])

    def grow(self, num_reqs: int, levels: DraftLevels, root_hidden: Tensor, max_keys: int) -> None:
        """Draws the children of the roots, then of each level below.

        Args:
            num_reqs: Requests of the batch, R.
            levels: The tree to grow.
            root_hidden: ``[R, H]``: the draft's hidden state at each root.
            max_keys: No request has more committed tokens.
        """
        self.draw_below_roots(num_reqs, levels, root_hidden)
        for level in levels.levels[1:]:
            self.grow_level(num_reqs, levels, level, max_keys)

    def draw_below_roots(self, num_reqs: int, levels: DraftLevels, root_hidden: Tensor) -> None:
        """Draws the children of the roots, whose hidden states are ``[R, H]``."""
        logits = self._model.compute_logits(root_hidden)
        self._drafted.draw(self._batch, num_reqs, levels, levels.levels[0], logits)

    def grow_level(self, num_reqs: int, levels: DraftLevels, level: Level, max_keys: int) -> None:
        """One forward pass over the nodes of a level below the roots, and their children."""
        roots = self._batch.roots[:num_reqs]
        # A node past the model's length is always trimmed by the scheduler; it only
        # must not write outside the request's blocks.
        self._inputs.read_level(
            requests=self._batch.slots[:num_reqs],
            roots=roots,
            tokens=self._drafted.tokens[:num_reqs],
            nodes=level.nodes,
            first=level.first,
            depth=level.depth,
            max_len=self._max_model_len,
            longest=self._draft_max_len,
        )
        hidden = self._forward(roots, level.first, level.width, levels.ancestors, max_keys)
        logits = self._model.compute_logits(hidden)
        self._drafted.draw(self._batch, num_reqs, levels, level, logits)

    def _forward(
        self, context_lens: Tensor, first: int, width: int, ancestors: Tensor, max_keys: int
    ) -> Tensor:
        """Hidden states ``[R * width, H]`` of the rows that `_inputs` holds."""
        num_reqs, inputs = len(context_lens), self._inputs
        rows = num_reqs * width
        queries = DraftQueries(
            context_lens=context_lens,
            query_start_loc=self._batch.multiples(width)[: num_reqs + 1],
            first=first,
            width=width,
            ancestors=ancestors,
            max_keys=min(max_keys + first + width, self._max_model_len),
            max_slots=self._max_model_len,
        )
        return self._model.forward(
            inputs.token_ids[:rows], inputs.positions[:rows], inputs.slots[:, :rows], queries
        )


def chain_width(levels: DraftLevels) -> int:
    """Tokens per request that the captured pass reads: a path of such a tree, and the root."""
    return levels.tree.depth + 1
