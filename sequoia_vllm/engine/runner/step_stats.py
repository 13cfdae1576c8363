"""Counters of speculation: time per part, acceptance by depth and by child."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.metrics.counts import TreeCounts, paths_of
from sequoia_vllm.tree import TokenTree

_MOST_PENDING = 256


@dataclass
class StepStats:
    """Sums over the steps since the last `reset`; cheap enough to be always on.

    The worker counts and times each step; the V1 runner and its proposer time the forwards, too.
    After verification the runner hands over the step's trees, and the worker sends them to the
    front end (`take_paths`).
    """

    tree: TokenTree  # the engine's tree
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by part: "target" (its forward, without the LM head), "draft" (its forwards, with
    theirs), "drafting" (all of it, on V1) and "step" (all of the step)."""
    steps: int = 0  # engine steps
    trace: list[tuple[str, int, int, float]] | None = None
    """If not None, every model forward: (part, requests, tokens, seconds)."""

    def __post_init__(self) -> None:
        self._untaken: list[NDArray[np.int32]] = []
        self.reset()

    def reset(self) -> None:
        """Starts counting anew."""
        self.seconds = dict.fromkeys(("target", "draft", "drafting", "step"), 0.0)
        self.steps = 0
        self.trace = None if self.trace is None else []
        self._counts = TreeCounts(self.tree)
        # Verified trees not counted yet: after a large model's forward nothing is in
        # the CPU's caches, and every operation of a step is slow.
        self._pending: list[NDArray[np.int32]] = []

    def timed(self, part: str, requests: int = 0, tokens: int = 0) -> _Timed:
        """Adds the wall time of a ``with`` block to ``part``, and to the trace of forwards."""
        return _Timed(self, part, requests, tokens)

    def add_time(self, part: str, requests: int, tokens: int, seconds: float) -> None:
        """Adds the wall time of a part of a step; see `timed`."""
        self.seconds[part] += seconds
        if self.trace is not None and tokens:
            self.trace.append((part, requests, tokens, seconds))

    def observe(
        self,
        accepted_nodes: NDArray[np.int64],
        num_nodes: NDArray[np.int64],
        is_dynamic: NDArray[np.bool_] | bool = False,
    ) -> None:
        """Takes one step's verified trees (arguments of `paths_of`)."""
        self.observe_paths(paths_of(self.tree, accepted_nodes, num_nodes, is_dynamic))

    def observe_paths(self, paths: NDArray[np.int32]) -> None:
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
            "seconds": dict(self.seconds),
            "trace": self.trace,
            "tree": self.tree.to_dict(),
        }


class _Timed:
    """Times a block, in a third of the time that a generator would take."""

    __slots__ = ("_of", "_start", "_stats")

    def __init__(self, stats: StepStats, part: str, requests: int, tokens: int) -> None:
        self._stats, self._of = stats, (part, requests, tokens)

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._stats.add_time(*self._of, time.perf_counter() - self._start)
