"""Counters of verified trees, in one vector to add and send, and the log line about them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.tree import TokenTree

_MOST_PENDING = 256
_PATH_DTYPE = np.dtype("<i4")  # little-endian: paths also go between machines


def paths_of(
    tree: TokenTree,
    accepted_nodes: NDArray[np.int64],
    num_nodes: NDArray[np.int64],
    is_dynamic: NDArray[np.bool_] | bool = False,
) -> NDArray[np.int32]:
    """The outcome of verification for each tree, in one small array that is counted later.

    Args:
        accepted_nodes: int ``[B, D]``, -1 padded; of the tree at most its depth. Of a branch of
            told tokens only how many were accepted.
        num_nodes: int ``[B]``: size of each tree as scored, root included; 0: it is a branch.
        is_dynamic: bool ``[B]``: has a topology of its own.

    Returns:
        int32 ``[B, 1 + depth]``: nodes scored, minus that for a dynamic tree; then the accepted
        ones, -1 padded.
    """
    accepted_nodes = accepted_nodes[:, : tree.depth]
    paths = np.full((len(num_nodes), 1 + tree.depth), -1, dtype=_PATH_DTYPE)
    paths[:, 0] = np.where(is_dynamic, -num_nodes, num_nodes)
    paths[:, 1 : 1 + accepted_nodes.shape[1]] = accepted_nodes
    return paths


class TreeCounts:
    """Outcomes of verification over some steps with one tree.

    Dynamic trees have as many nodes, likeliest first, but other children: they count by node.
    Branches of told tokens are no trees of the draft's: only totals have them.

    Attributes:
        values: All counts, int64; the others are views of it.
        depth_counts: ``[depth + 1]``: trees of which exactly d nodes were accepted.
        offered: ``[depth, branch]``: nodes of depth d on an accepted path that had a child k.
        accepted: ``[depth, branch]``: how often that child was accepted.
        scored_nodes: ``[size]``: how many dynamic trees had this node, in the stored order.
        accepted_nodes: ``[size]``: how often it was accepted.
    """

    def __init__(self, tree: TokenTree) -> None:
        shapes = (2,), (tree.depth + 1,), (2, tree.depth, tree.max_branch), (2, tree.size)
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        self.values = np.zeros(ends[-1], dtype=np.int64)
        parts = zip(np.split(self.values, ends[:-1]), shapes, strict=True)
        totals, depths, children, nodes = (part.reshape(shape) for part, shape in parts)
        self._totals, self.depth_counts = totals, depths
        self.offered, self.accepted = children
        self.scored_nodes, self.accepted_nodes = nodes

    @classmethod
    def of_paths(cls, tree: TokenTree, paths: Sequence[NDArray[np.int32]]) -> Self:
        """Counts verified trees; ``paths``: from `paths_of`, in any groups."""
        counts = cls(tree)
        if not paths:
            return counts
        together = np.concatenate(paths)
        is_told = together[:, 0] == 0
        of_told, drawn = int(together[is_told, 1].sum()), len(together)
        together = together[~is_told]
        num_accepted = (together[:, 1:] >= 0).sum(axis=1)
        counts._totals[:] = drawn, drawn + of_told + num_accepted.sum()
        counts.depth_counts[:] = np.bincount(num_accepted, minlength=tree.depth + 1)
        is_dynamic = together[:, 0] < 0
        counts._count_nodes(together[is_dynamic])
        counts._count_children(tree, together[~is_dynamic])
        return counts

    def _count_nodes(self, paths: NDArray[np.int32]) -> None:
        """Counts dynamic trees; the root's node is accepted in all of them."""
        size = self.scored_nodes.shape[0]
        ends = np.bincount(-paths[:, 0], minlength=size + 1)
        self.scored_nodes[:] = len(paths) - ends.cumsum()[:size]
        self.accepted_nodes[:] = np.bincount(paths[:, 1:][paths[:, 1:] > 0], minlength=size)
        self.accepted_nodes[0] = len(paths)

    def _count_children(self, tree: TokenTree, paths: NDArray[np.int32]) -> None:
        num_nodes, nodes = paths[:, 0], paths[:, 1:]
        num_accepted = (nodes >= 0).sum(axis=1)
        parents = np.zeros_like(nodes)  # node at each depth, the root first
        parents[:, 1:] = nodes[:, :-1]
        visited = np.arange(tree.depth) <= num_accepted[:, None]
        children = _children_of(tree)[parents]  # [B, depth, branch]
        offered = (children < num_nodes[:, None, None]) & visited[:, :, None]
        self.offered[:] = offered.sum(axis=0)
        self.accepted[:] = (offered & (children == nodes[:, :, None])).sum(axis=0)

    @classmethod
    def from_bytes(cls, tree: TokenTree, packed: bytes) -> Self:
        """`of_paths` of the bytes of such arrays, one after another.

        Raises:
            ValueError: They are no whole number of paths in trees of this depth.
        """
        width = 1 + tree.depth
        if len(packed) % cls.path_bytes(tree):
            raise ValueError(
                f"{len(packed)} bytes are not the paths of a tree of depth {tree.depth}: worker "
                "and front end must run with one tree"
            )
        return cls.of_paths(tree, [np.frombuffer(packed, dtype=_PATH_DTYPE).reshape(-1, width)])

    @staticmethod
    def path_bytes(tree: TokenTree) -> int:
        """Bytes of one verified tree in `from_bytes`."""
        return (1 + tree.depth) * _PATH_DTYPE.itemsize

    @property
    def trees(self) -> int:
        """Verified trees."""
        return int(self._totals[0])

    @property
    def tokens(self) -> int:
        """Tokens emitted by them: the accepted nodes, and one bonus token each."""
        return int(self._totals[1])

    def add(self, other: Self) -> None:
        """Adds the counts of further steps with the same tree."""
        np.add(self.values, other.values, out=self.values)

    def clear(self) -> None:
        """Starts counting anew."""
        self.values.fill(0)


@dataclass
class StepStats:
    """Sums over the steps since the last `reset`; cheap enough to be always on.

    The worker counts the steps. After verification the runner hands over the step's trees, and the
    worker sends them to the front end (`take_paths`).
    """

    tree: TokenTree  # the engine's tree
    steps: int = 0  # engine steps
    drafting: float = 0.0  # seconds that the V1 runner drafted, since its start

    def __post_init__(self) -> None:
        self._untaken: list[NDArray[np.int32]] = []
        self.reset()

    def reset(self) -> None:
        """Starts counting anew."""
        self.steps = 0
        self._counts = TreeCounts(self.tree)
        # Verified trees not counted yet: after a large model's forward nothing is in
        # the CPU's caches, and every operation of a step is slow.
        self._pending: list[NDArray[np.int32]] = []

    def observe(self, paths: NDArray[np.int32]) -> None:
        """Takes one step's verified trees, as `paths_of` returns them."""
        self._untaken.append(paths)
        self._pending.append(paths)
        if len(self._pending) >= _MOST_PENDING:
            self._count_pending()

    def take_paths(self) -> bytes:
        """What `observe` took since the last call, as bytes (`TreeCounts.from_bytes`)."""
        taken, self._untaken = self._untaken, []
        return b"".join(paths.tobytes() for paths in taken)

    @property
    def counts(self) -> TreeCounts:
        """Counts of the trees verified since the last reset."""
        self._count_pending()
        return self._counts

    def _count_pending(self) -> None:
        pending, self._pending = self._pending, []
        self._counts.add(TreeCounts.of_paths(self.tree, pending))

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data: see `TreeCounts`. "tree_steps" counts verified trees."""
        counts = self.counts
        return {
            "steps": self.steps,
            "tree_steps": counts.trees,
            "tokens": counts.tokens,
            "depth_counts": counts.depth_counts.tolist(),
            "offered": counts.offered.tolist(),
            "accepted": counts.accepted.tolist(),
            "tree": self.tree.to_dict(),
        }


@lru_cache(maxsize=16)
def _children_of(tree: TokenTree) -> NDArray[np.int64]:
    """``[size, branch]``: the children of each node; no child: above every node."""
    children = np.full((tree.size, tree.max_branch), np.iinfo(np.int64).max)
    for node, own in enumerate(tree.children):
        children[node, : len(own)] = own
    return children


def interval_line(
    tree: TokenTree, counts: TreeCounts, load: tuple[int, int] | None, speedup: float | None = None
) -> str | None:
    """Describes the trees of an interval; None if none was verified.

    Shares "by depth": of the paths that reached a node with children, how many went on; with
    dynamic trees, of all that reached the depth. "By child": p[k] of static trees. ``load``: drafts
    of each request in the latest step, and its requests; None, like ``speedup``: not known.
    """
    if counts.trees == 0:
        return None
    shape = f"up to {tree.num_speculative_tokens} drafts, depth {tree.depth}"
    if load is not None:
        drafts, requests = load
        now = f"{drafts or 'no'} draft{'s' * (drafts != 1)}"
        shape += f" ({now} with {requests} request{'s' * (requests != 1)})"
    by_depth = _shares(counts.accepted.sum(axis=1), counts.offered[:, 0])
    if counts.scored_nodes[0] > 0:
        reached = counts.depth_counts[::-1].cumsum()[::-1]
        by_depth = _shares(reached[1:], reached[:-1])
    by_child = _shares(counts.accepted.sum(axis=0), counts.offered.sum(axis=0))
    gain = "" if speedup is None else f"; {speedup:.2f}x plain"
    return (
        f"{shape}; {counts.tokens / counts.trees:.2f} tokens per step; "
        f"accepted by depth {by_depth}{by_child and f'; by child {by_child}'}{gain}"
    )


def _shares(accepted: NDArray[np.int64], offered: NDArray[np.int64]) -> str:
    """Shares up to the last entry with trials; later entries have none."""
    tried = offered > 0
    return ", ".join(f"{share:.2f}" for share in accepted[tried] / offered[tried])
