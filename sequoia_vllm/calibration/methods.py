"""Which way of verification is better with a tree, and what tree is better with that one.

With Algorithm 2 the chance of a node to be accepted is that of its position, whatever else the
tree has. With traversal it depends on what is below the node and beside it, so it is counted on
the tree itself, and the tree is chosen once more from these counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.config import Verification
from sequoia_vllm.library.files import AcceptanceFile

_FEWEST_TRIALS = 100


def tokens_per_step(measured: AcceptanceFile) -> float:
    """What a tree emitted per step of a finished or interrupted measurement."""
    state = measured.calibration
    assert state is not None
    return state.tokens / max(1, state.trees)


def better_method(measured: dict[Verification, AcceptanceFile]) -> Verification:
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
    counted, trials = on_tree.vector.table, np.atleast_2d(np.asarray(on_tree.trials))
    base = vector.vector.table
    depths, width = max(len(counted), len(base)), max(counted.shape[1], base.shape[1])
    rows = [
        _row(_padded(base[min(depth, len(base) - 1)], width), None, None)
        if depth >= len(counted)
        else _row(
            _padded(base[min(depth, len(base) - 1)], width),
            _padded(counted[depth], width),
            _padded(trials[depth], width),
        )
        for depth in range(depths)
    ]
    return on_tree.model_copy(
        update={"acceptance": rows, "trials": None, "low": None, "high": None}
    )


def _padded(row: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    return np.pad(np.asarray(row, dtype=np.float64), (0, width - len(row)))


def _row(
    base: NDArray[np.float64],
    counted: NDArray[np.float64] | None,
    trials: NDArray[np.float64] | None,
) -> list[float]:
    if counted is None or trials is None:
        return base.tolist()
    known = trials >= _FEWEST_TRIALS
    left, base_left = 1 - counted[known].sum(), 1 - base[known].sum()
    others = base * (max(left, 0.0) / base_left if base_left > 0 else 0.0)
    return np.where(known, counted, others).round(6).tolist()
