"""Index tables of a tree, with which a device drafts, scores and verifies; made once per tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sequoia_vllm.drafting.draft_plan import inner_rows, rows_per_tree
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.topology import Topology


@dataclass(frozen=True)
class Level:
    """The m nodes of one depth that have children, whose children are drawn together.

    Attributes:
        depth: Depth of these nodes, in edges; 0 is the root.
        first: Place of the first of them in draft order: the root, then every
            other inner node, depth by depth. They follow one another from there.
        nodes: int32 ``[m]``: stored index of each.
        parents: int64 ``[m]``: place of each one's parent on the level above; the root: 0.
        counts: int32 ``[m]``: children of each.
        columns: int32 ``[m, b]``: stored index of each child, in draft order;
            0 beyond a node's last child.
        rows: int32 ``[m]``: where each node's Q is kept, see `TreeTables.inner_rows`.
    """

    depth: int
    first: int
    nodes: Tensor
    parents: Tensor
    counts: Tensor
    columns: Tensor
    rows: Tensor

    @property
    def width(self) -> int:
        """Nodes of this level."""
        return len(self.nodes)


class DraftLevels:
    """The levels of a tree, in the form in which the draft grows them.

    Attributes:
        tree: The tree.
        levels: From the root down.
        depths: int64 ``[I]``: depth of each inner node in draft order, the root first.
        ancestors: bool ``[I, I]``: which inner nodes each sees, itself included.
        rows_per_tree: Rows from one request's first Q to the next one's.
    """

    def __init__(self, tree: TokenTree, rows: Sequence[int], device: torch.device) -> None:
        """Makes the arrays.

        Args:
            tree: The engine's tree, or a prefix of it.
            rows: Where the Q of each node of the engine's whole tree is kept.
            device: Where they go.
        """
        self.tree = tree
        self.rows_per_tree = rows_per_tree(tree, rows)
        by_depth: list[list[int]] = [[] for _ in range(tree.depth)]
        for node, children in enumerate(tree.children):
            if children:
                by_depth[int(tree.depths[node])].append(node)
        order = [node for nodes in by_depth for node in nodes]

        def tensor(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.levels = []
        above, first = [0], 0
        for depth, nodes in enumerate(by_depth):
            branch = max(len(tree.children[node]) for node in nodes)
            columns = [
                [*tree.children[node], *[0] * (branch - len(tree.children[node]))] for node in nodes
            ]
            self.levels.append(
                Level(
                    depth=depth,
                    first=first,
                    nodes=tensor(nodes),
                    parents=tensor(
                        [above.index(max(tree.parents[node], 0)) for node in nodes], torch.int64
                    ),
                    counts=tensor([len(tree.children[node]) for node in nodes]),
                    columns=tensor(columns),
                    rows=tensor([rows[node] for node in nodes]),
                )
            )
            above, first = nodes, first + len(nodes)
        self.depths = tensor(tree.depths[order].tolist(), torch.int64)
        self.ancestors = torch.from_numpy(tree.ancestor_mask[np.ix_(order, order)]).to(device)

    @property
    def num_inner(self) -> int:
        """Nodes that the draft model reads, the root included."""
        return len(self.depths)


class TreeTables:
    """The engine's tree, of N nodes; requests draft it or a prefix of it.

    Attributes:
        tree: The tree.
        children: int32 ``[N, b]``: the nodes below each node in draft order, then -1.
        inner_rows: int32 ``[N]``: row of each node's Q: its place among the nodes with
            children, in stored order; leaves: -1. Prefixes keep the rows of the whole.
        ancestors: bool ``[N, N]``: which nodes each sees, itself included.

    Args:
        tree: The tree.
        device: Where its tables go.
    """

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self.tree = tree
        parents = torch.from_numpy(tree.parents_array.copy())[None]
        self.children = Topology.from_parents(parents).children[0].to(device, torch.int32)
        self._inner_rows = inner_rows(tree)
        self.inner_rows = torch.tensor(self._inner_rows, dtype=torch.int32, device=device)
        self.ancestors = torch.from_numpy(tree.ancestor_mask.copy()).to(device)
        self._levels: dict[int, DraftLevels] = {}

    def levels_of(self, drafts: int) -> DraftLevels:
        """The tree of the first ``drafts`` nodes below the root, as the draft grows it."""
        if drafts not in self._levels:
            tree = self.tree.trim(drafts + 1)
            self._levels[drafts] = DraftLevels(tree, self._inner_rows, self.ancestors.device)
        return self._levels[drafts]

    @property
    def levels(self) -> DraftLevels:
        """The whole tree, as the draft grows it."""
        return self.levels_of(self.tree.num_speculative_tokens)
