"""How far up the ladder of tree sizes it pays to time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sequoia_vllm.hardware.choose import MAX_DEPTH
from sequoia_vllm.hardware.step_curves import BatchTimes, TimedStep, measuring_tree, middle_round
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.optimize import Frontier

_MOST_PLAIN_STEPS = 12.0
# Of the steps timed, a quarter is quicker: one slow moment must not end the ladder.
_QUICK = 25


@dataclass(frozen=True)
class Ladder:
    """Decides after each size whether a larger one might still be the answer.

    Attributes:
        frontiers: The most tokens that trees of any size get accepted, for each
            acceptance vector that a tree may be chosen for; none: not known.
    """

    frontiers: tuple[Frontier, ...] = ()

    @classmethod
    def of(cls, vectors: Sequence[Acceptance], largest: int) -> Ladder:
        """For trees of up to ``largest`` nodes."""
        return cls(tuple(Frontier.of(vector, largest, MAX_DEPTH) for vector in vectors))

    def goes_on(self, times: BatchTimes, size: int) -> bool:
        """Whether a tree larger than ``size``, which was just timed, might be the best.

        Not when a step with this one already takes as long as 12 plain steps: no
        draft gets so many tokens accepted. Where acceptance is known, not either when
        the most tokens that any larger tree can get, in the least time that its step
        can take, are slower than what was timed already.
        """
        plain = _typical(middle_round(times.plain), lambda timed: timed.seconds)
        tree = _typical(middle_round(times.trees[size]), lambda timed: timed.seconds)
        if tree >= _MOST_PLAIN_STEPS * plain:
            return False
        return not self.frontiers or any(
            _highest(frontier, times, size) > _reached(frontier, times, plain)
            for frontier in self.frontiers
        )


def _highest(frontier: Frontier, times: BatchTimes, size: int) -> float:
    """Tokens per second that no larger tree exceeds, of one request.

    Its target pass and verification take no less than those of this size, and
    each of its levels no less than the draft's quickest pass.
    """
    steps = middle_round(times.trees[size])
    scored = _quickest(steps, lambda timed: timed.step.target + timed.step.verify)
    level = _quickest(steps, lambda timed: min(s for _, s in timed.step.levels()))
    tokens = frontier.expected_tokens[-1, 1:]
    depths = np.arange(1, len(tokens) + 1)
    return float((tokens / (scored + level * depths)).max())


def _reached(frontier: Frontier, times: BatchTimes, plain: float) -> float:
    """Tokens per second of the best that was timed: plain decoding, or a tree.

    A step with a tree of a size and depth takes about what was timed with the
    measuring tree of both.
    """
    found = [1 / plain]
    for size in times.trees:
        seconds = _typical(middle_round(times.trees[size]), lambda timed: timed.seconds)
        tokens = frontier.expected_tokens[size, measuring_tree(size).depth]
        found.append(float(tokens) / seconds)
    return max(found)


Value = Callable[[TimedStep], float]


def _typical(steps: Sequence[TimedStep], value: Value) -> float:
    return float(np.median([value(timed) for timed in steps]))


def _quickest(steps: Sequence[TimedStep], value: Value) -> float:
    return float(np.percentile([value(timed) for timed in steps], _QUICK))
