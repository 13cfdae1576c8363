"""The line about trees that goes into the log at every interval."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.tree import TokenTree


def interval_line(tree: TokenTree, counts: TreeCounts, drafts: int | None) -> str | None:
    """What the trees of an interval brought; None if none was verified.

    The shares "by depth" are of the paths that got to a node with children,
    how many went on; those "by child" are the acceptance vector p[k] that trees
    are optimised for: of the nodes with a k-th child, at how many it was taken.

    Args:
        tree: The engine's tree.
        counts: Of the interval.
        drafts: Nodes drafted for each request at the present load; None: not known.
    """
    if counts.trees == 0:
        return None
    shape = f"tree {tree.size} nodes, depth {tree.depth}"
    if drafts is not None and drafts < tree.num_speculative_tokens:
        shape += f" ({drafts + 1} nodes at this load)"
    by_depth = _shares(counts.accepted.sum(axis=1), counts.offered[:, 0])
    by_child = _shares(counts.accepted.sum(axis=0), counts.offered.sum(axis=0))
    return (
        f"Sequoia: {shape}; {counts.tokens / counts.trees:.2f} tokens per step; "
        f"accepted by depth {by_depth}; by child {by_child}"
    )


def _shares(accepted: NDArray[np.int64], offered: NDArray[np.int64]) -> str:
    """Shares up to the last entry with trials, which later ones cannot have either."""
    tried = offered > 0
    return ", ".join(f"{share:.2f}" for share in accepted[tried] / offered[tried])
