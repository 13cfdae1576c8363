"""Acceptance as a serving engine counts it, of which the latest weighs most."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.metrics import TreeCounts
from sequoia_vllm.tree import Acceptance, TokenTree

# Verified trees after which a count weighs half: a workload that changes is followed within
# a few hundred trees, and the noise of an expected number of tokens is about 2 %.
HALF_LIFE = 1000.0
# A position that was offered so often is known as well as all depths together are.
_POOLED = 8.0


class FadingAcceptance:
    """p[depth][child] of one tree (paper, Assumption 3.1), under the method that verifies.

    Args:
        tree: The engine's tree; engines may draft a prefix of it.
        prior: Of positions that were never offered, such as those of an earlier, wider tree.
    """

    def __init__(self, tree: TokenTree, prior: Acceptance | None = None) -> None:
        self._tree = tree
        self._prior = prior or Acceptance.of([0.0])
        self._values = np.zeros(len(TreeCounts.zeros(tree).values))

    @property
    def trees(self) -> float:
        """Weight of the verified trees that are remembered."""
        return float(self._values[0])

    def add(self, counts: TreeCounts) -> None:
        """Adds counts of the same tree; older ones fade."""
        self._values *= 0.5 ** (counts.trees / HALF_LIFE)
        self._values += counts.values

    def estimate(self) -> Acceptance:
        """The vector ``[depth][child]``; positions that were seldom offered lean on other depths.

        A child that was never offered at any depth has the prior's acceptance.
        """
        # Of the fading numbers, the views that `TreeCounts` has of whole ones.
        counts = TreeCounts(self._tree.depth, self._tree.max_branch, self._values)  # type: ignore[arg-type]
        prior = self._prior.table
        shape = np.maximum(counts.offered.shape, prior.shape)
        offered, accepted = (_padded(part, shape) for part in (counts.offered, counts.accepted))
        rows = np.minimum(np.arange(shape[0]), len(prior) - 1)
        elsewhere = _padded(prior[rows], shape)
        seen = offered.sum(axis=0) > 0
        elsewhere[:, seen] = accepted.sum(axis=0)[seen] / offered.sum(axis=0)[seen]
        table = (accepted + _POOLED * elsewhere) / (offered + _POOLED)
        return Acceptance.of(table / np.maximum(table.sum(axis=1, keepdims=True), 1.0))

    def expected_tokens(self) -> NDArray[np.float64]:
        """Tokens per step of each prefix of the tree, ``[size]``; entry m: with m drafts."""
        tokens: NDArray[np.float64] = np.cumsum(self._tree.values(self.estimate()))
        return tokens

    def to_list(self) -> list[float]:
        """What `restore` takes."""
        return [round(value, 3) for value in self._values.tolist()]

    def restore(self, values: list[float]) -> None:
        """Starts from what an earlier engine counted, at the weight of a few hundred trees.

        Raises:
            ValueError: If it was of a tree of another shape.
        """
        if len(values) != len(self._values):
            raise ValueError(f"{len(values)} counts are of a tree of another shape")
        weight = min(1.0, HALF_LIFE / 4 / max(values[0], 1.0))
        self._values[:] = np.array(values) * weight


def _padded(table: NDArray[Any], shape: NDArray[np.int64]) -> NDArray[np.float64]:
    """The table as float64, and zeros up to this shape."""
    wider = np.zeros(shape)
    wider[: table.shape[0], : table.shape[1]] = table
    return wider
