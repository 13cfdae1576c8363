"""Which way of verification is better with a tree, and what tree is better with that one.

With Algorithm 2 the chance of a node to be accepted is that of its position, whatever else the
tree has. With traversal it depends on what is below the node and beside it, so it is counted on
the tree itself, and says how much of that tree to draft at each batch size. It does not choose
another tree: leaves are accepted less often than they would be with children, so trees chosen from
such counts are too shallow (on the pair in this repository by 2 to 3 % of the tokens at 16 nodes).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.calibration.counts import FEWEST_TRIALS
from sequoia_vllm.library.files import AcceptanceFile


def tokens_per_step(measured: AcceptanceFile) -> float:
    """What a tree emitted per step of a finished or interrupted measurement."""
    state = measured.calibration
    assert state is not None
    return state.tokens / max(1, state.trees)


def better_method(measured: dict[str, AcceptanceFile]) -> str:
    """The one with more tokens per step from the same tree; of equal ones the first."""
    return max(measured, key=lambda method: tokens_per_step(measured[method]))


def refined(vector: AcceptanceFile, on_tree: AcceptanceFile) -> AcceptanceFile:
    """Acceptance as counted on a tree, and elsewhere as the vector says.

    Args:
        vector: Of every position up to the probing tree's width.
        on_tree: Counted on a tree, whose deeper nodes have fewer children.

    Returns:
        A file with ``p[d][k]``. Children with fewer than 100 trials on the tree get what the
        vector's row says of them, given that none of the counted ones is accepted.
    """
    base, counted = vector.vector.table, on_tree.vector.table
    trials = np.atleast_2d(np.asarray(on_tree.trials))
    shape = max(len(base), len(counted)), max(base.shape[1], counted.shape[1])
    # Depths below the vector's last row have that one; those below the tree were not counted.
    base = np.pad(base, ((0, shape[0] - len(base)), (0, 0)), mode="edge")
    base, counted, trials = (_padded(table, shape) for table in (base, counted, trials))
    known = trials >= FEWEST_TRIALS
    left, base_left = (
        1 - np.where(known, table, 0).sum(axis=1, keepdims=True) for table in (counted, base)
    )
    share = np.divide(left.clip(0), base_left, out=np.zeros_like(left), where=base_left > 0)
    rows = np.where(known, counted, base * share).round(6).tolist()
    return on_tree.model_copy(
        update={"acceptance": rows, "trials": None, "low": None, "high": None}
    )


def _padded(table: NDArray[np.float64], shape: tuple[int, int]) -> NDArray[np.float64]:
    """With zeros after its rows and columns."""
    more = [(0, size - own) for size, own in zip(shape, table.shape, strict=True)]
    return np.pad(table.astype(np.float64), more)
