"""Estimates an acceptance vector from how often children were offered and accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.token_tree import TokenTree

_Z95 = 1.959964
_DIGITS = 6
_STEP = 1e-3  # of a share, for slopes
FEWEST_TRIALS = 100
"""With fewer trials, we treat a share as noise."""
TAIL = 6
"""Levels of a probing tree below the counted ones."""
Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class AcceptanceEstimate:
    """An acceptance vector with its uncertainty; each field is ``[depth][child]``.

    Attributes:
        acceptance: Share of trials in which the child was accepted.
        low, high: Wilson 95 % interval of each entry.
        trials: How often a node of this depth with this child was reached.
    """

    acceptance: list[list[float]]
    low: list[list[float]]
    high: list[list[float]]
    trials: list[list[int]]


def probing_tree(branch: int, depth: int = 1, tail: int = 0) -> TokenTree:
    """The wide tree whose children are counted.

    Depth 1 is a star: a root with ``branch`` children. Below it, the first two children of each
    level's first node have ``branch`` children, too. Such nodes are reached most often. One
    follows likely tokens of the draft and the other less likely ones, so a row counts not only
    easy contexts.

    A tree starts where the one before it ended. If trees ended with the counted levels, many
    would start within a stretch that is easy to draft. So the same nodes have ``tail`` more
    levels of two children, which are not counted.

    Raises:
        TreeError: If a number is below 1, or ``tail`` below 0.
    """
    parents = [-1]
    leading, second = 0, None
    for level in range(depth + tail):
        children = branch if level < depth else min(2, branch)
        first = len(parents)
        parents += [leading] * children
        if second is not None:
            parents += [second] * children
        leading, second = first, first + 1 if children > 1 else None
    return TokenTree(tuple(parents))


def wilson_interval(successes: int, trials: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2) / scale
    return max(0.0, middle - spread), min(1.0, middle + spread)


def estimate_acceptance(offered: Counts, accepted: Counts) -> AcceptanceEstimate:
    """The acceptance vector of these counts (`StepStats.offered`, `StepStats.accepted`).

    Rows below the root with fewer than 100 trials are dropped: the tree optimizer uses the last
    row for all deeper levels, and should not trust noise. Trees are sometimes trimmed from the
    end, so late children may have fewer trials. If a row's shares then sum to more than 1, they
    are scaled to 1.

    Raises:
        CalibrationError: If no tree was verified.
    """
    if not offered or not offered[0] or offered[0][0] == 0:
        raise CalibrationError("no tree was verified: give more prompts, or more tokens for each")
    counted = list(zip(offered, accepted, strict=True))
    rows = [_row(*counted[0])]
    for tried, taken in counted[1:]:
        if tried[0] < FEWEST_TRIALS:
            break
        rows.append(_row(tried, taken))
    shares, lows, highs = (list(part) for part in zip(*rows, strict=True))
    return AcceptanceEstimate(shares, lows, highs, [list(row) for row in offered[: len(rows)]])


def precision(estimate: AcceptanceEstimate) -> float:
    """How well the vector is known: the number that `AcceptanceSettings.precision` bounds.

    It is the largest product of an entry's half-width (95 %) and the share of trees that reach
    its depth. The entry may make the expected accepted nodes of its depth wrong by so much.
    """
    roots = estimate.trials[0][0]
    return max(
        (high - low) / 2 * trials[0] / roots
        for lows, highs, trials in zip(estimate.low, estimate.high, estimate.trials, strict=True)
        for low, high in zip(lows, highs, strict=True)
    )


def tokens_margin(tree: TokenTree, acceptance: Acceptance, trials: Counts) -> float:
    """Half-width of the 95 % interval of a tree's expected tokens, from counting noise.

    Other prompts than those counted on add to the error.

    Args:
        tree: The tree.
        acceptance: Its vector.
        trials: Trials of each entry of the vector, see `AcceptanceEstimate`.
    """
    table, tokens = acceptance.table, tree.expected_tokens(acceptance)
    variance = 0.0
    for depth, tried in enumerate(trials):
        if not tried or tried[0] == 0:
            continue
        slopes = np.empty(len(tried))
        for child in range(len(tried)):
            lower = table.copy()
            lower[depth, child] *= 1 - _STEP
            change = tokens - tree.expected_tokens(Acceptance(lower))
            slopes[child] = change / max(_STEP * table[depth, child], _STEP**2)
        # At most one of a node's children is accepted, so the shares are one multinomial's.
        shares = table[depth, : len(tried)]
        variance += float(shares @ slopes**2 - (shares @ slopes) ** 2) / tried[0]
    return _Z95 * math.sqrt(max(variance, 0.0))


def add_counts(first: Counts, second: Counts) -> list[list[int]]:
    """Adds two tables of counts of the same shape; an empty one counts as zeros."""
    if not first or not second:
        return [list(row) for row in first or second]
    return [
        [a + b for a, b in zip(row, other, strict=True)]
        for row, other in zip(first, second, strict=True)
    ]


def _row(tried: Sequence[int], taken: Sequence[int]) -> tuple[list[float], ...]:
    shares = [a / n if n else 0.0 for a, n in zip(taken, tried, strict=True)]
    total = max(1.0, sum(shares))
    intervals = [wilson_interval(a, n) for a, n in zip(taken, tried, strict=True)]
    return (
        [round(share / total, _DIGITS) for share in shares],
        [round(low, _DIGITS) for low, _ in intervals],
        [round(high, _DIGITS) for _, high in intervals],
    )
