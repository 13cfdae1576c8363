"""How often an engine's drafts are accepted, and the file that keeps what it learned.

Acceptance is counted while it serves; the latest trees weigh most. The file is for its next start.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.tree import Acceptance, TokenTree
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE

Workload = Literal["greedy", "sampled", "mixed"]
# From this many remembered trees on, the expected tokens are known to about 3 %.
_FEWEST_TREES = 500.0
# Verified trees after which a count weighs half. Estimates then follow a change of workload within
# a few hundred trees, and expected tokens have about 2 % noise.
HALF_LIFE = 1000.0
# After this many offers, a position's own count weighs as much as the mean over all depths.
_POOLED = 8.0
# Offers at all depths together that the prior counts as, at first: else an engine's first trees
# decide. It fades with the counts.
_ASSUMED = 2.0


class StateError(SequoiaError, ValueError):
    """The file holds no state, or the state of another version."""


class FadedCounts(FileModel):
    """Counts of one workload (`FadingAcceptance`)."""

    trees: float = Field(ge=0, description="Weight of its verified static trees.")
    offered: list[list[float]] = Field(description="[depth][child], at their weight.")
    accepted: list[list[float]] = Field(description="[depth][child], at their weight.")
    vector: list[list[float]] = Field(
        description="p[depth][child] by these counts; where they are missing, by earlier ones."
    )
    vector_trees: float = Field(
        default=0.0, ge=0, description="Like trees, but not reduced by restarts and pauses."
    )


class AdaptationState(FileModel):
    """What a `DraftController` learned."""

    described = "adaptation"
    refused = StateError
    schema_: Literal["sequoia-vllm/adaptation/1"] = "sequoia-vllm/adaptation/1"
    parents: list[int] = Field(description="The tree.")
    schedule: list[int] = Field(description="Drafts by batch size from 0 on, as configured.")
    lookup: list[int] = Field(description="Drafts by batch size, as learned.")
    acceptance: dict[Workload, FadedCounts]
    times: list[tuple[int, int, float]] = Field(description="(drafts, batch size, seconds).")

    def usual_acceptance(self) -> tuple[Workload, Acceptance] | None:
        """The vector of the workload with the most trees; None: too few were verified."""
        workload = max(self.acceptance, key=lambda name: self.acceptance[name].vector_trees)
        counted = self.acceptance[workload]
        if counted.vector_trees < _FEWEST_TREES:
            return None
        return workload, Acceptance.of(counted.vector)


class FadingAcceptance:
    """p[depth][child] of one tree (paper, Assumption 3.1), under the method that verifies;
    ``trees`` is the weight of the verified trees that are remembered.

    The acceptance of dynamic trees is counted by node, in the order in which nodes are cut: they
    have a node where the draft is sure of it, so their children's would not be a static tree's.
    Positions that were never offered have that of ``prior``, for example an earlier, wider tree's,
    with its weight of verified trees; None: the published vector.
    """

    def __init__(
        self, tree: TokenTree, prior: Acceptance | None = None, prior_trees: float = 0.0
    ) -> None:
        self._tree = tree
        self._prior = prior or REFERENCE_ACCEPTANCE
        self.trees = 0.0
        self._vector_trees, self._assumed = prior_trees, _ASSUMED
        self._expected: NDArray[np.float64] | None = None  # cached until counts change
        self._offered, self._accepted = np.zeros((2, tree.depth, tree.max_branch))
        self._dynamic = np.zeros((2, tree.size))  # of dynamic trees: scored and accepted nodes

    def add(self, counts: TreeCounts) -> float:
        """Adds counts of the same tree; older ones keep the returned share of their weight."""
        self._expected = None
        trees = int(counts.depth_counts.sum())
        kept = 0.5 ** (trees / HALF_LIFE)
        self.trees = kept * self.trees + trees
        static = trees - int(counts.scored_nodes[0])
        self._vector_trees = 0.5 ** (static / HALF_LIFE) * self._vector_trees + static
        self._assumed *= kept
        self._dynamic = kept * self._dynamic + [counts.scored_nodes, counts.accepted_nodes]
        self._offered = kept * self._offered + counts.offered
        self._accepted = kept * self._accepted + counts.accepted
        return kept

    def fade(self, trees: float) -> float:
        """Lowers the weight of all counts to at most so many trees, as they may be out of date;
        returns the share of their weight that they keep."""
        self._expected = None
        kept = min(1.0, trees / max(self.trees, 1.0))
        self.trees *= kept
        self._offered, self._accepted = kept * self._offered, kept * self._accepted
        self._dynamic *= kept
        self._assumed *= kept
        return kept

    def estimate(self) -> Acceptance:
        """The vector ``[depth][child]``; rarely offered positions borrow from other depths. A child
        never offered has the prior's acceptance, scaled down where a row would exceed 1."""
        prior = self._prior.table
        shape = np.maximum(self._offered.shape, prior.shape)
        offered, accepted = _padded(self._offered, shape), _padded(self._accepted, shape)
        rows = np.minimum(np.arange(shape[0]), len(prior) - 1)
        elsewhere = _padded(prior[rows], shape)
        seen = offered.sum(axis=0) > 0
        pooled = accepted.sum(axis=0) + self._assumed * elsewhere
        elsewhere[:, seen] = (pooled / (offered.sum(axis=0) + self._assumed))[:, seen]
        table = (accepted + _POOLED * elsewhere) / (offered + _POOLED)
        assumed = table[:, ~seen].sum(axis=1, keepdims=True)
        room = 1 - table[:, seen].sum(axis=1, keepdims=True)
        table[:, ~seen] *= np.clip(room / np.maximum(assumed, 1e-9), 0, 1)
        return Acceptance.of(table / np.maximum(table.sum(axis=1, keepdims=True), 1.0))

    def expected_tokens(self) -> NDArray[np.float64]:
        """Tokens per step of each prefix of the tree, ``[size]``; entry m has m drafts."""
        if self._expected is None:
            values = self._tree.values(self.estimate())
            if (share := self._dynamic[0, 0] / max(self.trees, 1e-9)) > 0:
                values = (1 - share) * values + share * self._dynamic_values(values)
            self._expected = np.cumsum(values)
        return self._expected

    def doubt(self) -> float:
        """Standard deviation of the accepted nodes of a tree, as counted (by a Poisson law)."""
        accepted = max(float(self.expected_tokens()[-1]) - 1, 0.0)
        return (accepted / (self.trees + _POOLED)) ** 0.5

    def _dynamic_values(self, static: NDArray[np.float64]) -> NDArray[np.float64]:
        """How often each node of a dynamic tree is accepted, ``[size]``. Rarely scored nodes borrow
        from the static tree's values, which are scaled to the others."""
        scored, accepted = self._dynamic
        expected = (scored * static)[1:].sum()
        scale = accepted[1:].sum() / expected if expected > 0 else 1.0
        assumed = np.minimum(static * np.append(1.0, np.full(len(static) - 1, scale)), 1.0)
        return (accepted + _POOLED * assumed) / (scored + _POOLED)

    def state(self) -> FadedCounts:
        """The counts in the form that `restore` takes."""
        return FadedCounts(
            trees=round(self.trees - self._dynamic[0, 0], 3),
            vector_trees=round(self._vector_trees, 3),
            offered=self._offered.round(3).tolist(),
            accepted=self._accepted.round(3).tolist(),
            vector=self.estimate().table.round(6).tolist(),
        )

    def restore(self, state: FadedCounts) -> None:
        """Starts from an earlier engine's counts, at less weight; ValueError: of another tree."""
        counts = np.array([state.offered, state.accepted])
        if counts.shape[1:] != self._offered.shape:
            raise ValueError(f"counts of shape {counts.shape[1:]} belong to another tree")
        self.trees = state.trees
        self._offered, self._accepted = counts
        self.fade(HALF_LIFE / 4)


def _padded(table: NDArray[np.float64], shape: NDArray[np.int64]) -> NDArray[np.float64]:
    wider = np.zeros(shape)
    wider[: table.shape[0], : table.shape[1]] = table
    return wider
