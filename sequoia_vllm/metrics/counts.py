"""Counters of verified trees: one vector, so that adding and sending them is one operation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.tree import TokenTree

_FIRST_DEPTH = 2  # after trees and tokens
_DTYPE = np.dtype("<i8")  # also between machines


@dataclass(frozen=True, eq=False)
class TreeCounts:
    """What verification did over some steps with one tree.

    Attributes:
        depth, branch: Of the tree: its edges to the deepest node, its most children.
        values: int64 ``[2 + depth + 1 + 2 * depth * branch]``; the properties
            below are views of it.
    """

    depth: int
    branch: int
    values: NDArray[np.int64]

    @classmethod
    def zeros(cls, tree: TokenTree) -> TreeCounts:
        """Nothing counted yet."""
        size = _size(tree.depth, tree.max_branch)
        return cls(tree.depth, tree.max_branch, np.zeros(size, dtype=np.int64))

    @classmethod
    def of(
        cls,
        trees: int,
        tokens: int,
        depth_counts: NDArray[np.int64],
        offered: NDArray[np.int64],
        accepted: NDArray[np.int64],
    ) -> TreeCounts:
        """Packs counters kept apart.

        Args:
            trees: Verified trees.
            tokens: Tokens that they emitted.
            depth_counts: int64 ``[depth + 1]``.
            offered, accepted: int64 ``[depth, branch]``.
        """
        parts = ((trees, tokens), depth_counts, offered.ravel(), accepted.ravel())
        return cls(offered.shape[0], offered.shape[1], np.concatenate(parts))

    @classmethod
    def from_bytes(cls, tree: TokenTree, packed: bytes) -> TreeCounts:
        """What `to_bytes` packed for the same tree; read-only.

        Raises:
            ValueError: If it was packed for a tree of another shape.
        """
        size = _size(tree.depth, tree.max_branch)
        if len(packed) != size * _DTYPE.itemsize:
            raise ValueError(
                f"{len(packed)} bytes are not the counts of a tree of depth {tree.depth} with "
                f"{tree.max_branch} children: worker and front end must run with one tree"
            )
        return cls(tree.depth, tree.max_branch, np.frombuffer(packed, dtype=_DTYPE))

    def to_bytes(self) -> bytes:
        """``values`` as little-endian int64."""
        return self.values.astype(_DTYPE, copy=False).tobytes()

    @property
    def trees(self) -> int:
        """Verified trees."""
        return int(self.values[0])

    @property
    def tokens(self) -> int:
        """Tokens emitted by them: the accepted nodes, and one bonus token each."""
        return int(self.values[1])

    @property
    def depth_counts(self) -> NDArray[np.int64]:
        """``[depth + 1]``: trees of which exactly d nodes were accepted."""
        return self.values[_FIRST_DEPTH : _FIRST_DEPTH + self.depth + 1]

    @property
    def offered(self) -> NDArray[np.int64]:
        """``[depth, branch]``: nodes of depth d on an accepted path that had a child k."""
        return self._children(0)

    @property
    def accepted(self) -> NDArray[np.int64]:
        """``[depth, branch]``: how often that child was accepted."""
        return self._children(1)

    def add(self, other: TreeCounts) -> None:
        """Adds the counts of further steps with the same tree."""
        np.add(self.values, other.values, out=self.values)

    def clear(self) -> None:
        """Starts counting anew."""
        self.values.fill(0)

    def __sub__(self, earlier: TreeCounts) -> TreeCounts:
        return TreeCounts(self.depth, self.branch, self.values - earlier.values)

    def _children(self, part: int) -> NDArray[np.int64]:
        size = self.depth * self.branch
        start = _FIRST_DEPTH + self.depth + 1 + part * size
        return self.values[start : start + size].reshape(self.depth, self.branch)


def _size(depth: int, branch: int) -> int:
    return _FIRST_DEPTH + depth + 1 + 2 * depth * branch
