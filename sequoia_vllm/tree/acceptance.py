"""The acceptance vector: how likely the verifier is to take a node's k-th child."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_input import key_name, read_json


class AcceptanceError(SequoiaError, ValueError):
    """An acceptance vector that is not one; says which entry is wrong."""


_FORM = (
    "an acceptance vector is a list of numbers p[k], like [0.6, 0.2], or a list of equally long "
    "lists p[d][k], like [[0.6, 0.2], [0.5, 0.0]]: p[0] is of the root's children, p[1] of theirs"
)


def _uneven(values: Any) -> str:
    """Says which list is shorter or longer than the first; "": none is."""
    if not isinstance(values, Sequence) or not all(isinstance(row, Sequence) for row in values):
        return ""
    lengths = [len(row) for row in values]
    depth = next((depth for depth, length in enumerate(lengths) if length != lengths[0]), None)
    if depth is None:
        return ""
    return f". p[0] has {lengths[0]} numbers, and p[{depth}] has {lengths[depth]}: fill up with 0"


@dataclass(frozen=True)
class Acceptance:
    """Positional acceptance probabilities (paper, Assumption 3.1 and appendix)."""

    table: NDArray[np.float64]
    """float64, shape ``[depths, branches]``, read-only. ``table[d, k]`` is the probability that, at
    an accepted node of depth d, the verifier accepts *its child k* (from 0), whatever its siblings
    do; rows sum to at most 1. One row means that depth does not matter; depths beyond the last row
    use the last row."""

    @classmethod
    def of(cls, values: "Acceptance | ArrayLike") -> "Acceptance":
        """Checks ``p[k]`` or ``p[d][k]``; entry 0 is the first child.

        Raises:
            AcceptanceError: It is empty, ragged, negative, NaN or not of numbers, or a row sums to
                more than 1. The message names the entry as it is written.
        """
        if isinstance(values, Acceptance):
            return values
        try:
            table = np.array(values, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise AcceptanceError(f"{_FORM}{_uneven(values)}") from None
        if table.ndim not in (1, 2) or table.size == 0:
            raise AcceptanceError(f"{_FORM}. It is non-empty; got shape {table.shape}")
        by_depth = table.ndim == 2
        table = np.atleast_2d(table)
        for what, wrong in (
            ("not a finite number", ~np.isfinite(table)),
            ("negative", table < 0),
            ("more than 1", table > 1),
        ):
            if wrong.any():
                depth, child = np.argwhere(wrong)[0]
                of = f"p[{depth}][{child}]" if by_depth else f"p[{child}]"
                raise AcceptanceError(f"{of} is {what}: {table[depth, child]}")
        sums = table.sum(axis=1)
        # Published vectors are rounded to six digits; their sums may be off by that.
        if (sums > 1 + 1e-4).any():
            depth = int(np.argmax(sums))
            raise AcceptanceError(
                f"the probabilities in {f'p[{depth}]' if by_depth else 'p'} sum to "
                f"{sums[depth]:.6f}: at most one child is accepted, so they cannot exceed 1"
            )
        table.setflags(write=False)
        return cls(table)

    def probability(self, child: int, depth: int = 0) -> float:
        """p of ``child`` (from 0) of a node at ``depth``; 0 beyond the vector."""
        if child >= self.table.shape[1]:
            return 0.0
        return float(self.table[min(depth, len(self.table) - 1), child])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Acceptance) and np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        return hash((self.table.shape, self.table.tobytes()))

    def to_list(self) -> list[float] | list[list[float]]:
        """``p[k]``, or ``p[d][k]`` where depth matters."""
        rows: list[list[float]] = self.table.tolist()
        return rows[0] if len(rows) == 1 else rows

    @classmethod
    def load(cls, path: Path | str) -> "Acceptance":
        """Reads ``{"acceptance": [...]}`` or a bare list from a JSON file.

        Raises:
            AcceptanceError: The file cannot be read, or has no such vector.
        """
        data: Any = read_json(Path(path), "acceptance", AcceptanceError)
        if isinstance(data, dict):
            if "acceptance" not in data:
                holds = ", ".join(sorted(map(key_name, data))[:8]) or "nothing"
                no_key = f'acceptance file {path} has no "acceptance" key'
                raise AcceptanceError(f"{no_key}; it holds {holds}")
            data = data["acceptance"]
        if not isinstance(data, Sequence) or isinstance(data, str):
            raise AcceptanceError(f"acceptance file {path} holds no list of probabilities")
        try:
            return cls.of(data)
        except AcceptanceError as error:
            raise AcceptanceError(f"acceptance file {path}: {error}") from error


REFERENCE_ACCEPTANCE = Acceptance.of(
    [
        0.634183, 0.107946, 0.056972, 0.022489, 0.01949, 0.014993, 0.004498, 0.002999,
        0.011994, 0.004498, 0.007496, 0.004498, 0.005997, 0.002999, 0.001499, 0.002999,
        0.001499, 0.002999, 0.0, 0.002999, 0.002999, 0.002999, 0.0, 0.001499,
        0.0, 0.001499, 0.0, 0.0, 0.0, 0.001499, 0.001499, 0.001499,
    ]
)  # fmt: skip
"""``acceptance-rate-vector.pt`` of the authors' public code; they do not state its model pair."""
