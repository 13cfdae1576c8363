"""Counters of speculation: acceptance by depth and by child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.tree import TokenTree

_MOST_PENDING = 256


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
