"""Counters of what speculation does: time per part, acceptance by depth and by child."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sequoia_vllm.metrics import TreeCounts
from sequoia_vllm.tree import TokenTree


@dataclass
class StepStats:
    """Sums over the steps since the last `reset`; cheap enough to be always on.

    Attributes:
        tree: The engine's tree.
        seconds: Wall time by part: "target" (its forward, without the LM head),
            "draft" (its forwards, with theirs) and "step" (all of the step).
        steps: Engine steps.
        tree_steps: Times a request's tree was verified.
        tokens: Tokens emitted by those.
        depth_counts: ``[depth + 1]``: how often exactly d nodes were accepted.
        trace: If not None, every model forward: (part, requests, tokens, seconds).
        offered, accepted: ``[depth, branch]``: how often a node of depth d on
            the accepted path had a child k, and how often that child was taken.
    """

    tree: TokenTree
    seconds: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    tree_steps: int = 0
    tokens: int = 0
    trace: list[tuple[str, int, int, float]] | None = None

    def __post_init__(self) -> None:
        no_child = np.iinfo(np.int64).max
        self._children = np.full((self.tree.size, self.tree.max_branch), no_child)
        for node, children in enumerate(self.tree.children):
            self._children[node, : len(children)] = children
        self.reset()

    def reset(self) -> None:
        """Starts counting anew."""
        self.seconds = {"target": 0.0, "draft": 0.0, "step": 0.0}
        self.steps = self.tree_steps = self.tokens = 0
        self.trace = None if self.trace is None else []
        self.depth_counts = np.zeros(self.tree.depth + 1, dtype=np.int64)
        self.offered = np.zeros((self.tree.depth, self.tree.max_branch), dtype=np.int64)
        self.accepted = np.zeros_like(self.offered)
        self._taken = TreeCounts.zeros(self.tree)

    @contextmanager
    def timed(self, part: str, requests: int = 0, tokens: int = 0) -> Iterator[None]:
        """Adds the wall time of the block to ``part``, and to the trace of forwards."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[part] += seconds
            if self.trace is not None and tokens:
                self.trace.append((part, requests, tokens, seconds))

    def observe(
        self,
        accepted_nodes: np.ndarray,
        num_accepted: np.ndarray,
        num_nodes: np.ndarray,
    ) -> None:
        """Counts one step's verified trees.

        Args:
            accepted_nodes: int ``[B, D]``, -1 padded.
            num_accepted: int ``[B]``.
            num_nodes: int ``[B]``: size of each tree as scored, root included.
        """
        self.tree_steps += len(num_accepted)
        self.tokens += int(num_accepted.sum()) + len(num_accepted)
        self.depth_counts += np.bincount(num_accepted, minlength=len(self.depth_counts))
        depth = min(accepted_nodes.shape[1], self.tree.depth)
        if depth == 0:
            return
        path = np.pad(accepted_nodes[:, :depth], ((0, 0), (1, 0)))  # node at each depth
        visited = np.arange(depth) <= num_accepted[:, None]
        children = self._children[path[:, :depth]]  # [B, depth, branch]
        offered = (children < num_nodes[:, None, None]) & visited[:, :, None]
        self.offered[:depth] += offered.sum(axis=0)
        self.accepted[:depth] += (offered & (children == path[:, 1:, None])).sum(axis=0)

    def take_counts(self) -> TreeCounts | None:
        """What `observe` counted since the last call or reset; None: nothing."""
        if self.tree_steps == self._taken.trees:
            return None
        now = TreeCounts.of(
            self.tree_steps, self.tokens, self.depth_counts, self.offered, self.accepted
        )
        counted, self._taken = now - self._taken, now
        return counted

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data."""
        return {
            "steps": self.steps,
            "tree_steps": self.tree_steps,
            "tokens": self.tokens,
            "depth_counts": self.depth_counts.tolist(),
            "offered": self.offered.tolist(),
            "accepted": self.accepted.tolist(),
            "seconds": dict(self.seconds),
            "trace": self.trace,
            "tree": self.tree.to_dict(),
        }
