"""The device's work of a drafting pass: read what was committed, then grow level by level.

Everything is read from `DraftBatch` and other buffers that stay in place. Nothing depends on values
that only the device knows. So a CUDA graph may hold all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.dynamic_levels import DynamicLevels
from sequoia_vllm.drafting.tree_tables import DraftLevels, Level, picked
from sequoia_vllm.kernels.begin_drafting import find_continuations
from sequoia_vllm.kernels.draft_inputs import DraftInputs
from sequoia_vllm.kernels.node_masks import NodeMask


def chain_ancestors(nodes: int, device: torch.device) -> Tensor:
    """bool ``[N, N]``: each node of a chain sees itself and all before it."""
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()


@dataclass(frozen=True, kw_only=True)
class NodeQueries:
    """What nodes of R requests' trees attend to, in a pass of the draft or the target."""

    request_slots: Tensor  # int64 ``[R]``: of each, -1 for padding
    context_lens: Tensor  # int32 ``[R]``: tokens in the cache before node 0
    query_start_loc: Tensor  # int32 ``[R + 1]``: first row of each request, then the end
    first: int  # node of the first query; node j lies in slot ``context_lens + j``
    width: int  # most queries of a request, one for each node from ``first`` on
    ancestors: Tensor  # bool ``[I, I]`` or ``[S, I, I]``: which of the tree's nodes each sees
    max_keys: int  # bound on the keys of a request
    mask: NodeMask | None = None
    """By request slot, in place of ``ancestors`` where trees change from step to step."""
    max_slots: int | None = None
    """Bound on the slots of a request. Nodes behind it have none, and no query sees them. None: all
    that have a block have a slot. The keys of the others are undefined."""
    uneven: bool = False
    """Whether requests share the rows in any way, as in graphs of steps that read prompts. Then the
    device shares its programs among them."""


@dataclass(frozen=True, kw_only=True)
class DraftQueries(NodeQueries):
    """One forward pass of the draft over nodes of R requests' trees, or over committed tokens."""

    token_ids: Tensor  # int32 ``[rows]``, request after request
    positions: Tensor  # int64 ``[rows]``: for the model
    slots: Tensor
    """int64 ``[groups, rows]``: where keys and values go, by group of cache layers; -1: nowhere."""
    recurrent_states: Tensor | None = None
    """``[rows, F]``: what earlier passes left for these rows. For committed tokens:
    `combine_hidden_states` of the target's states. None: nothing."""


@dataclass(frozen=True)
class DraftStates:
    """The states that a forward pass leaves at its rows."""

    hidden: Tensor  # ``[rows, H]``: logits are computed from them
    recurrent_states: Tensor | None = None
    """``[rows, F]``: read together with the tokens below a row's; None: nothing is."""

    def new_zeros(self, count: int) -> DraftStates:
        """Zeros for ``count`` such rows."""
        read = self.recurrent_states
        zeros = None if read is None else read.new_zeros(count, *read.shape[1:])
        return DraftStates(self.hidden.new_zeros(count, *self.hidden.shape[1:]), zeros)

    def first(self, count: int) -> DraftStates:
        """States of the first ``count`` rows."""
        recurrent_states = None if self.recurrent_states is None else self.recurrent_states[:count]
        return DraftStates(self.hidden[:count], recurrent_states)

    def below(self, slots: Tensor, parents: Tensor) -> Tensor | None:
        """``[R * m, F]``: the recurrent_states that m nodes below these rows of R requests get.

        ``parents`` are a `Level`'s, by request slot or not; ``slots`` those of the R requests.
        """
        if self.recurrent_states is None:
            return None
        by_request = self.recurrent_states.view(len(slots), -1, self.recurrent_states.shape[1])
        return picked(by_request, parents, slots).flatten(0, 1)


class DraftModel(ABC):
    """Interface that growth needs of a draft: a forward over its own part of a paged KV cache."""

    @abstractmethod
    def forward(self, queries: DraftQueries) -> DraftStates:
        """The states of a pass, whose keys and values are kept."""

    def combine_hidden_states(self, target_states: Tensor) -> Tensor:
        """``[rows, F]``: the vectors that a draft reads beside tokens, made from the target's
        states."""
        raise NotImplementedError(f"{type(self).__name__} reads nothing of the target")

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, V]``: draft logits of such hidden states."""


class TreeGrowth:
    """Grows the trees of a batch, in two passes that may be CUDA graphs of their own.

    The first reads committed tokens (`read_committed`), and keeps the draft's states at the roots
    (`keep_roots`). The second is `grow`.

    Args:
        batch: The requests.
        drafted: Where tokens and Q are kept.
        model: The draft.
        inputs: Buffers for what it reads.
        depth: Depth of the engine's tree.
        longest_chain: Most committed tokens of a request that `read_committed` takes.
        target_states: ``[rows, A]``: a buffer with the target's states of the committed tokens that
            are read; None: the draft reads tokens alone.
    """

    def __init__(
        self,
        batch: DraftBatch,
        drafted: DraftedTrees,
        model: DraftModel,
        inputs: DraftInputs,
        depth: int,
        longest_chain: int,
        target_states: Tensor | None = None,
    ) -> None:
        self._batch, self._drafted, self._model, self._inputs = batch, drafted, model, inputs
        self._target_states = target_states
        self._roots: DraftStates | None = None
        # New tokens are a tree without branches below what the draft has read: a path's, or more.
        self._chains = [
            chain_ancestors(length, batch.slots.device) for length in (depth + 1, longest_chain)
        ]

    def read_committed(
        self,
        num_reqs: int,
        num_rows: int,
        most: int,
        max_keys: int,
        target_states: Tensor | None = None,
    ) -> DraftStates:
        """Reads the committed tokens that `DraftBatch.first_rows` divides among requests.

        Args:
            num_reqs: Requests of the batch, R.
            num_rows: At least the tokens of all of them.
            most: At least the tokens of each.
            max_keys: No request has more committed tokens.
            target_states: ``[num_rows, A]``, in place of the buffer's.

        Returns:
            States of ``num_rows`` rows.
        """
        self.committed_inputs(num_reqs, num_rows)
        path, longest = self._chains
        return self._forward(
            self._batch.starts[:num_reqs], num_rows, 0, most,
            path if most <= len(path) else longest, max_keys,
            self.combined_states(num_rows, target_states), first_rows=self._batch.first_rows,
            uneven=len(path) < most and num_rows < num_reqs * most,
        )  # fmt: skip

    def keep_roots(self, states: DraftStates, num_reqs: int) -> None:
        """Keeps, of what was read, the states of R roots for `grow`: each its request's last one.

        The buffer is made once: a graph's first run, before it is captured, does so.
        """
        if self._roots is None:
            self._roots = states.new_zeros(len(self._batch.slots))
        rows, kept = self._batch.last_rows[:num_reqs], self._roots.first(num_reqs)
        torch.index_select(states.hidden, 0, rows, out=kept.hidden)
        if states.recurrent_states is not None:
            torch.index_select(states.recurrent_states, 0, rows, out=kept.recurrent_states)

    def committed_inputs(self, num_reqs: int, num_rows: int) -> DraftInputs:
        """The draft's inputs, whose first rows are the committed tokens, see `read_committed`."""
        self._inputs.read_committed(self._batch, num_reqs, num_rows)
        return self._inputs

    def combined_states(self, num_rows: int, target_states: Tensor | None) -> Tensor | None:
        """``[num_rows, F]``: what is read beside committed tokens; None: nothing is."""
        if self._target_states is None:
            return None
        states = self._target_states[:num_rows] if target_states is None else target_states
        return self._model.combine_hidden_states(states)

    def grow(self, num_reqs: int, levels: DraftLevels, max_keys: int) -> None:
        """Grows the trees of R requests below the roots whose states were kept.

        ``levels`` are the tree's. No request has more than ``max_keys`` committed tokens.
        """
        assert self._roots is not None, "committed tokens are read before trees grow"
        self.look_back(num_reqs)
        self._grow_below(self._roots.first(num_reqs), num_reqs, levels, max_keys)

    def look_back(self, num_reqs: int) -> None:
        """Notes what the texts and predictions of R requests say comes next."""
        batch = self._batch
        slots, roots, told, branches = (
            values[:num_reqs] for values in (batch.slots, batch.roots, batch.told, batch.branches)
        )
        if told.shape[1]:
            texts, predictions = self._inputs.all_token_ids, batch.predictions
            find_continuations(texts, slots, roots, told, branches, predictions, batch.window)

    def _grow_below(
        self, roots: DraftStates, num_reqs: int, levels: DraftLevels, max_keys: int
    ) -> None:
        """Draws the children of the roots, whose states are R rows, then of each level below."""
        states = roots
        logits = self._model.compute_logits(states.hidden)
        self._draw(num_reqs, levels, levels.levels[0], logits)
        for level in levels.levels[1:]:
            recurrent_states = states.below(self._batch.slots[:num_reqs], level.parents)
            states = self.grow_level(num_reqs, levels, level, max_keys, recurrent_states)

    def grow_level(
        self,
        num_reqs: int,
        levels: DraftLevels,
        level: Level,
        max_keys: int,
        recurrent_states: Tensor | None = None,
    ) -> DraftStates:
        """One forward pass over a level's m nodes of each request, and their children; see `grow`.

        Args:
            recurrent_states: ``[R * m, F]``: what the level above left for them.

        Returns:
            States of these nodes, R * m rows.
        """
        # The scheduler always trims a node past the model's length. Here it must only not write
        # outside the request's blocks.
        tokens = levels.tokens if isinstance(levels, DynamicLevels) else self._drafted.tokens
        self._inputs.read_level(self._batch, num_reqs, level, tokens)
        states = self._forward(
            self._batch.contexts[:num_reqs], num_reqs * level.width, level.first, level.width,
            levels.ancestors, max_keys, recurrent_states, levels.mask,
        )  # fmt: skip
        logits = self._model.compute_logits(states.hidden)
        self._draw(num_reqs, levels, level, logits)
        return states

    def _draw(self, num_reqs: int, levels: DraftLevels, level: Level, logits: Tensor) -> None:
        if isinstance(levels, DynamicLevels):
            levels.draw(self._drafted, self._batch, num_reqs, level, logits)
        else:
            self._drafted.draw(self._batch, num_reqs, levels, level, logits)

    def _forward(
        self,
        context_lens: Tensor,
        rows: int,
        first: int,
        width: int,
        ancestors: Tensor,
        max_keys: int,
        recurrent_states: Tensor | None,
        mask: NodeMask | None = None,
        first_rows: Tensor | None = None,
        uneven: bool = False,
    ) -> DraftStates:
        """The states of the rows that `_inputs` holds, ``width`` of each request.

        Where ``first_rows`` divide them, requests have at most as many.
        """
        inputs, batch, num_reqs = self._inputs, self._batch, len(context_lens)
        first_rows = batch.multiples(width) if first_rows is None else first_rows
        queries = DraftQueries(
            request_slots=batch.slots[:num_reqs],
            context_lens=context_lens,
            query_start_loc=first_rows[: num_reqs + 1],
            first=first,
            width=width,
            ancestors=ancestors,
            mask=mask,
            max_keys=min(max_keys + first + width, inputs.max_len),
            max_slots=inputs.max_len,
            uneven=uneven,
            token_ids=inputs.token_ids[:rows],
            positions=inputs.positions[:rows],
            slots=inputs.slots[:, :rows],
            recurrent_states=recurrent_states,
        )
        return self._model.forward(queries)
