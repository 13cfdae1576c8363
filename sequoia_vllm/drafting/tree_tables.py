"""Index tables of a tree, with which a device drafts, scores and verifies; made once per tree."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sequoia_vllm.drafting.draft_plan import inner_rows, rows_per_tree
from sequoia_vllm.kernels.node_masks import NodeMask
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.topology import Topology


@dataclass
class Level:
    """The m nodes of one depth that have children, whose children are drawn together."""

    depth: int  # depth of these nodes, in edges; 0 is the root
    first: int
    """Place of the first of them in draft order: the root, then every other inner node, depth by
    depth. They follow one another from there."""
    nodes: Tensor  # int32 ``[m]``: stored index of each
    parents: Tensor  # int64 ``[m]``: place of each one's parent on the level above; the root: 0
    counts: Tensor  # int32 ``[m]``: children of each
    columns: Tensor
    """int32 ``[m, b]``: stored index of each child, in draft order; 0 beyond a node's last
    child."""
    rows: Tensor  # int32 ``[m]``: where each node's Q is kept, see `TreeTables.inner_rows`

    @property
    def width(self) -> int:
        """Nodes of this level."""
        return self.nodes.shape[-1]


class DraftLevels:
    """The levels of a tree, in the form in which the draft grows them.

    Attributes:
        mask: What each inner node sees, where that changes from step to step; None: ``ancestors``.

    Args:
        tree: The engine's tree, or a prefix of it.
        rows: Where the Q of each node of the engine's whole tree is kept.
        device: Where they go.
    """

    mask: NodeMask | None = None

    def __init__(self, tree: TokenTree, rows: Sequence[int], device: torch.device) -> None:
        self.tree = tree
        self.rows_per_tree = rows_per_tree(tree, rows)  # from one request's first Q to the next's
        by_depth: list[list[int]] = [[] for _ in range(tree.depth)]
        for node, children in enumerate(tree.children):
            if children:
                by_depth[int(tree.depths[node])].append(node)
        order = [node for nodes in by_depth for node in nodes]

        def tensor(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.levels: list[Level] = []  # from the root down
        above, first = [0], 0
        for depth, nodes in enumerate(by_depth):
            below = [tree.children[node] for node in nodes]
            branch = max(map(len, below))
            parents = [above.index(max(tree.parents[node], 0)) for node in nodes]
            self.levels.append(
                Level(
                    depth=depth,
                    first=first,
                    nodes=tensor(nodes),
                    parents=tensor(parents, torch.int64),
                    counts=tensor([len(children) for children in below]),
                    columns=tensor([[*children, *[0] * branch][:branch] for children in below]),
                    rows=tensor([rows[node] for node in nodes]),
                )
            )
            above, first = nodes, first + len(nodes)
        # bool ``[I, I]``: which inner nodes each sees, itself included.
        self.ancestors = torch.from_numpy(tree.ancestor_mask[np.ix_(order, order)]).to(device)


class TreeTables:
    """The engine's tree, of N nodes; requests draft it or a prefix of it."""

    mask: NodeMask | None = None  # of ``ancestors``, where they change from step to step

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self.tree = tree
        parents = torch.from_numpy(tree.parents_array.copy())
        self.parents = parents.to(device, torch.int32)  # int32 ``[N]``: each node's; the root: -1
        # int64 ``[N]``: depth of each node minus its index.
        self.shifts = torch.from_numpy(tree.depths - np.arange(tree.size)).to(device)
        # int32 ``[N, b]``: the nodes below each node in draft order, then -1.
        self.children = Topology.from_parents(parents[None]).children[0].to(device, torch.int32)
        # int32 ``[N]``: row of each node's Q: its place among the nodes with children, in stored
        # order; leaves: -1. Prefixes keep the rows of the whole.
        self._inner_rows = inner_rows(tree)
        self.inner_rows = torch.tensor(self._inner_rows, dtype=torch.int32, device=device)
        # bool ``[N, N]``: which nodes each sees, itself included.
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


def picked(values: Tensor, places: Tensor, slots: Tensor) -> Tensor:
    """``[R, m, ...]``: of each request's values ``[R, n, ...]`` those at m places.

    ``places`` are int ``[m]``, or ``[S, m]`` by request slot; ``slots`` int64 ``[R]``, padding -1.
    """
    if places.ndim == 1:
        return values.index_select(1, places)
    request = torch.arange(len(slots), device=slots.device)
    return values[request[:, None], places[slots.clamp(min=0)].long()]
