"""Score: lays out a batch's trees for one target forward, under a mask of ancestors.

Between steps the scheduler may cut trees, and replaces tokens that a grammar forbids.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_vllm.attention.cpu_kernel import TreeQueries
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.step.grow import Draft

BARE_ROOT = [0], [-1]  # tokens and parents of what a request without drafts has


@dataclass(frozen=True)
class StepState:
    """A step's trees, from their scoring to the commit: their rows, shapes, tokens and drafts.

    Attention, `verify` and `commit` read it. B requests have drafts, the largest tree N nodes.
    """

    requests: Tensor  # int64 ``[B]``: index of each request in the batch
    num_nodes: Tensor  # int64 ``[B]``: nodes scheduled, root included
    context_lens: Tensor  # int64 ``[B]``: committed tokens before the root
    first_row: Tensor  # int64 ``[B]``: row of the root in the batch's flat tokens
    first_logits_row: Tensor  # int64 ``[B]``: row of the root in the step's logits
    tokens: Tensor  # int64 ``[B, N]``: the tokens to score
    drawn: Tensor  # int64 ``[B, N]``: the tokens as drawn, before a grammar replaced any
    parents: Tensor  # int64 ``[B, N]``; -1 for the root, -2 for padding
    is_node: Tensor  # bool ``[B, N]``: not padding
    depths: Tensor  # int64 ``[B, N]``: has no meaning in padding
    ancestors: Tensor
    """bool ``[N, N]``, or ``[B, N, N]`` if any tree is dynamic: True where the column is the row's
    node or its ancestor."""
    is_dynamic: NDArray[np.bool_]  # bool ``[B]``: has a topology of its own
    drafts: tuple[Draft | None, ...]
    """Each request's draft; None: the scheduled tokens are not ours, and no node is accepted."""
    is_all: bool  # true if the step's logits are exactly these trees' rows

    @cached_property
    def rows(self) -> Tensor:
        """Row of each node in the flat tokens, int64 ``[B, N]``; padding repeats the root's."""
        offsets = torch.arange(self.tokens.shape[1])
        return self.first_row[:, None] + torch.where(self.is_node, offsets, 0)

    @property
    def logits_rows(self) -> Tensor:
        """Row of each node in the step's logits, int64 ``[B, N]``; padding repeats the root's."""
        return self.rows + (self.first_logits_row - self.first_row)[:, None]

    def tree_of(self, request: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of a request's nodes, by its index in the batch."""
        if not (found := (self.requests == request).nonzero().flatten().tolist()):
            return BARE_ROOT
        return self.tokens[found[0]].tolist(), self.parents[found[0]].tolist()

    def counted(self, accepted: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Accepted nodes ``[B, D]`` and nodes scored ``[B]``, in the form that `paths_of` takes.

        A node that requests shared counts by its place. So counts say what smaller budgets, which
        have its first places, would bring. Of a branch there is how much of it was accepted.
        """
        nodes, sizes = accepted.numpy().copy(), self.num_nodes.numpy().copy()
        for row, draft in enumerate(self.drafts):
            if draft is not None and draft.grown.is_told:
                nodes[row, 0], sizes[row] = (nodes[row] >= 0).sum(), 0
            elif draft is not None and (shared := draft.grown.shared) is not None:
                own = nodes[row] >= 0
                nodes[row, own] = shared.places[draft.row].numpy()[nodes[row, own]]
                sizes[row] = 1 + int(shared.places.max())
        return nodes, sizes

    def shifts(self) -> tuple[Tensor, Tensor]:
        """All M nodes' rows in the flat tokens, and their depths minus indices, int64 ``[M]``."""
        shifts = self.depths - torch.arange(self.tokens.shape[1])
        return self.rows[self.is_node], shifts[self.is_node]

    def queries(self, block_table: Tensor, tokens: int) -> TreeQueries:
        """These trees in the form that tree attention takes.

        Args:
            block_table: int32 ``[requests, max_blocks]``: the cache blocks of each request.
            tokens: Of the whole batch.
        """
        return TreeQueries(
            rows=torch.where(self.is_node, self.rows, -1),
            block_table=block_table[self.requests],
            context_lens=self.context_lens,
            num_nodes=self.num_nodes,
            ancestors=self.ancestors,
            max_keys=int((self.context_lens + self.num_nodes).max()),
            only_trees=int(self.num_nodes.sum()) == tokens,
        )


def lay_out(
    tables: TreeTables,
    scheduled_drafts: dict[str, list[int]],
    drafts: dict[str, Draft],
    request_index: dict[str, int],
    follows_grammar: Callable[[str], bool],
    query_ends: np.ndarray,
    seq_lens: np.ndarray,
) -> StepState | None:
    """Matches the drafts that the scheduler sent back with the trees that were grown.

    Args:
        tables: The engine's tree.
        scheduled_drafts: Draft tokens to score, by request id, perhaps trimmed.
        drafts: The grown trees, by request id.
        request_index: Row of each request id in the batch.
        follows_grammar: Whether the drafts of a request may have been replaced.
        query_ends: int ``[requests]``: end of each request's rows in the batch.
        seq_lens: int ``[requests]``: tokens of each request after this step.

    Returns:
        None: no request has drafts.
    """
    entries = sorted(
        (request_index[name], name, tokens) for name, tokens in scheduled_drafts.items() if tokens
    )
    if not entries:
        return None
    requests = np.array([request for request, _, _ in entries])
    num_nodes = np.array([len(scheduled) + 1 for _, _, scheduled in entries])
    max_nodes = int(num_nodes.max())

    tokens = np.zeros((len(entries), max_nodes), dtype=np.int64)
    parents = np.full((len(entries), max_nodes), -2, dtype=np.int64)
    parents[:, 0] = -1
    is_node = np.arange(max_nodes) < num_nodes[:, None]
    drawn = tokens.copy()
    matched: list[Draft | None] = []
    for row, (_, request_id, scheduled) in enumerate(entries):
        draft = drafts.get(request_id)
        grown: list[int] = []
        if draft is not None:
            grown = draft.grown.tokens[draft.row, 1 : len(scheduled) + 1].tolist()
        is_ours = len(grown) == len(scheduled) and (
            grown == list(scheduled) or follows_grammar(request_id)
        )
        matched.append(draft if is_ours else None)
        tokens[row, 1 : len(scheduled) + 1] = scheduled
        drawn[row, 1 : len(scheduled) + 1] = grown if is_ours else scheduled
    ours = np.array([draft is not None for draft in matched])
    own_size = min(max_nodes, tables.tree.size)  # a branch may have more nodes than the tree
    prefix = tables.tree.parents_array[:own_size]
    parents[ours, :own_size] = np.where(is_node[ours, :own_size], prefix, -2)
    depths = np.ones_like(parents)
    depths[:, :own_size] = tables.tree.depths[:own_size]
    layouts = {
        row: (draft.grown.layouts, draft.row)
        for row, draft in enumerate(matched)
        if draft is not None and draft.grown.layouts is not None
    }
    ancestors = tables.ancestors[:max_nodes, :max_nodes]
    if layouts or own_size < max_nodes:
        ancestors = torch.eye(max_nodes, dtype=torch.bool).repeat(len(entries), 1, 1)
        ancestors[:, :own_size, :own_size] = tables.ancestors[:own_size, :own_size]
    for row, (layout, place) in layouts.items():
        own = slice(num_nodes[row])
        parents[row, own] = layout.parents[place, own].numpy()
        depths[row, own] = layout.depths[place, own].numpy()
        ancestors[row, own, own] = layout.ancestors[place, own, own]

    sampled_rows = np.ones(len(query_ends), dtype=np.int64)
    sampled_rows[requests] = num_nodes
    first_logits_row = (np.cumsum(sampled_rows) - sampled_rows)[requests]
    return StepState(
        requests=torch.from_numpy(requests),
        num_nodes=torch.from_numpy(num_nodes),
        context_lens=torch.from_numpy(seq_lens[requests] - num_nodes),
        first_row=torch.from_numpy(query_ends[requests] - num_nodes),
        first_logits_row=torch.from_numpy(first_logits_row),
        tokens=torch.from_numpy(tokens),
        drawn=torch.from_numpy(drawn),
        parents=torch.from_numpy(parents),
        is_node=torch.from_numpy(is_node),
        depths=torch.from_numpy(depths),
        ancestors=ancestors,
        is_dynamic=np.isin(np.arange(len(entries)), list(layouts)),
        drafts=tuple(matched),
        is_all=len(requests) == len(query_ends),
    )
