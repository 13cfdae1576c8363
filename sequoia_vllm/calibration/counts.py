"""From how often a child was offered and taken to an acceptance vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sequoia_vllm.calibration.errors import CalibrationError
from sequoia_vllm.tree.token_tree import TokenTree

_Z95 = 1.959964
_DIGITS = 6
Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class AcceptanceEstimate:
    """An acceptance vector with its uncertainty; each field is ``[depth][child]``.

    Attributes:
        acceptance: Share of the trials in which the child was accepted.
        low, high: Wilson 95 % interval of each entry.
        trials: Times a node of this depth was reached that had this child.
    """

    acceptance: list[list[float]]
    low: list[list[float]]
    high: list[list[float]]
    trials: list[list[int]]


def spine_tree(branch: int, depth: int = 1) -> TokenTree:
    """A root with ``branch`` children, and as many below the first child of each level.

    Depth 1 is a star. Below it, a node's children are the draft's likeliest
    tokens after an accepted first child: the commonest way to get there.

    Raises:
        TreeError: If a number is below 1.
    """
    parents = [-1]
    spine = 0
    for _ in range(depth):
        first = len(parents)
        parents += [spine] * branch
        spine = first
    return TokenTree(tuple(parents))


def wilson_interval(successes: int, trials: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson's score interval for a proportion; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2) / scale
    return max(0.0, middle - spread), min(1.0, middle + spread)


def estimate_acceptance(offered: Counts, accepted: Counts) -> AcceptanceEstimate:
    """The acceptance vector of these counts (`StepStats.offered`, `StepStats.accepted`).

    Trees are sometimes trimmed from the end, so a late child may have fewer
    trials than an early one; if the shares then sum to more than 1 they are
    scaled to sum to 1.

    Raises:
        CalibrationError: If no tree was verified.
    """
    if not offered or not offered[0] or offered[0][0] == 0:
        raise CalibrationError("no tree was verified: give more prompts, or more tokens for each")
    rows = [
        _row(tried, taken)
        for tried, taken in zip(offered, accepted, strict=True)
        if tried[0] > 0  # deeper levels may never have been reached
    ]
    shares, lows, highs = (list(part) for part in zip(*rows, strict=True))
    return AcceptanceEstimate(shares, lows, highs, [list(row) for row in offered[: len(rows)]])


def _row(tried: Sequence[int], taken: Sequence[int]) -> tuple[list[float], ...]:
    shares = [a / n if n else 0.0 for a, n in zip(taken, tried, strict=True)]
    total = max(1.0, sum(shares))
    intervals = [wilson_interval(a, n) for a, n in zip(taken, tried, strict=True)]
    return (
        [round(share / total, _DIGITS) for share in shares],
        [round(low, _DIGITS) for low, _ in intervals],
        [round(high, _DIGITS) for _, high in intervals],
    )
