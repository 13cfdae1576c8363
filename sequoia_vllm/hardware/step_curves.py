"""Makes the curves of a profile from recorded times of engine steps.

A step is timed from its start to the start of the next one, so that scheduling, sampling and
output are in it. The curves add up to exactly the measured step (`CostModel.prefix_seconds`), for
every tree size that was measured. The target's part is the time that neither the draft's levels nor
verification explain. Its share that does not grow with the tree is `tree_seconds`.

Machines are shared and times are noisy, so everything is measured in rounds. A value is the median
of its middle round: the quietest would flatter a lucky size. Its spread: the interquartile range.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from sequoia_vllm.drafters.registry import HeadShape, drafts_in_one_pass
from sequoia_vllm.hardware.step_profile import Curve, Overhead, ProfileError
from sequoia_vllm.tree import TokenTree

_DIGITS = 7  # a tenth of a microsecond
_SHORTEST = 10.0**-_DIGITS


@dataclass(frozen=True)
class StepRecord:
    """One step of an engine; times in seconds."""

    start: float
    requests: int  # requests in it
    fewest: int  # tokens of the request that has fewest
    most: int  # tokens of the request that has most
    target: float  # the target's forward passes, LM head included
    decoding: bool = True  # whether none of its requests read its prompt
    sampling: float = 0.0  # from the target's logits to what is emitted: all verification, commit
    verify: float = 0.0  # walking the trees; 0 in a plain engine of Model Runner V1
    commit: float = 0.0  # moving accepted keys and values; 0 in a plain engine
    drafting: float = 0.0
    drawing: float = 0.0
    """The part of drafting outside the draft's forward passes, where that can be told."""
    passes: Sequence[tuple[int, float]] = ()
    """The draft's forward passes: (tokens of all requests, seconds). The first is over what the
    last step committed, each other one over one level of the trees."""
    seconds: float = 0.0  # up to the start of the next step, for steps that are `steady_steps`

    def levels(self) -> list[tuple[float, float]]:
        """Each pass as (tokens per request, seconds), drawing children included: time of drafting
        outside the forward passes is divided among them."""
        outside = self.drafting - sum(seconds for _, seconds in self.passes)
        share = outside / max(1, len(self.passes))
        return [(tokens / self.requests, seconds + share) for tokens, seconds in self.passes]


Rounds = list[list[StepRecord]]


@dataclass(frozen=True)
class BatchTimes:
    """What was measured at one batch size and context length."""

    batch_size: int
    context_length: int  # tokens of each in the middle of its completion
    plain: Rounds  # steps of a plain engine, by round
    trees: dict[int, Rounds]  # steps of a Sequoia engine, by tree size (root included) and round


@dataclass(frozen=True)
class BatchCurves:
    """A profile's entries for one batch size and context length."""

    target: Curve
    draft: Curve
    verification: Curve
    overhead: Overhead
    step_seconds: dict[int, float]  # measured time of a whole step, by tree size; 1: plain
    forward_seconds: dict[int, float]  # the target's forward pass and LM head within it


def measuring_tree(size: int) -> TokenTree:
    """A complete binary tree: its prefixes have levels of many widths."""
    return TokenTree((-1, *((node - 1) // 2 for node in range(1, size))))


def steady_steps(
    records: Iterable[Mapping[str, Any]], batch_size: int, size: int
) -> list[StepRecord]:
    """The steps in which every request scores a tree of ``size`` nodes, and so does the next."""
    steps = [StepRecord(**record) for record in records]

    def is_wanted(step: StepRecord) -> bool:
        return (step.requests, step.fewest, step.most) == (batch_size, size, size)

    return [
        replace(step, seconds=following.start - step.start)
        for step, following in pairwise(steps)
        if is_wanted(step) and is_wanted(following) and bool(step.passes) == (size > 1)
    ]


def check_steady(rounds: Rounds, batch_size: int, size: int) -> None:
    """Refuses rounds without a steady step, and says why there may be none."""
    if not any(rounds):
        raise ProfileError(
            f"no step had {batch_size} requests of {size} tokens: the KV cache may be too small "
            "(--kv-cache-gib), or completions too short (--max-tokens)"
        )


def middle_round(rounds: Rounds) -> list[StepRecord]:
    """The round in the middle by its median step (of an even number, the faster)."""
    by_time = sorted(
        (steps for steps in rounds if steps),
        key=lambda steps: _median(step.seconds for step in steps),
    )
    return by_time[(len(by_time) - 1) // 2]


def batch_curves(times: BatchTimes, first_pass: int = 1) -> BatchCurves:
    """Curves and overheads at one batch size and context length.

    Args:
        first_pass: The first of a step's draft passes that counts as a level. 0: also the one
            that reads the last step's tokens, for trees that have no other.

    Raises:
        ProfileError: Steps of some kind are missing.
    """
    rounds = {1: times.plain} | {size: times.trees[size] for size in sorted(times.trees)}
    for size, found in rounds.items():
        check_steady(found, times.batch_size, size)
    place = {"batch_size": times.batch_size, "context_length": times.context_length}
    draft = _level_curve(times, first_pass, place)
    middle = {size: middle_round(found) for size, found in rounds.items()}
    trees = [size for size in rounds if size > 1]

    def medians(value: Callable[[StepRecord], float]) -> dict[int, float]:
        return {size: _median(map(value, steps)) for size, steps in middle.items()}

    def spread(size: int, value: Callable[[StepRecord], float]) -> float:
        return _range_of([value(step) for steps in rounds[size] for step in steps])

    def unexplained(step: StepRecord) -> float:
        rows = [width for width, _ in step.levels()]
        # Drafting as the cost model has it, whose times never fall when rows are added.
        drafting = np.interp(rows, draft.tokens, np.maximum.accumulate(draft.seconds)).sum()
        return step.seconds - float(drafting) - step.verify

    def curve(seconds: dict[int, float], spreads: list[float]) -> Curve:
        values = [max(round(value, _DIGITS), _SHORTEST) for value in seconds.values()]
        return Curve(**place, tokens=list(seconds), seconds=values, spread=spreads)

    forward, step = medians(lambda step: step.target), medians(lambda step: step.seconds)
    verify, rest = medians(lambda step: step.verify), medians(unexplained)
    # Of those that move something; chains need no move.
    moves = [one.commit for size in trees for one in middle[size] if one.commit > 0]
    tree_seconds = max(0.0, min(rest[size] - forward[size] for size in trees))
    return BatchCurves(
        target=curve(
            {1: forward[1]} | {size: rest[size] - tree_seconds for size in trees},
            [
                spread(1, lambda step: step.target),
                *(spread(size, lambda step: step.seconds) for size in trees),
            ],
        ),
        draft=draft,
        verification=curve(
            {size: verify[size] for size in trees},
            [spread(size, lambda step: step.verify) for size in trees],
        ),
        overhead=Overhead(
            **place,
            plain_seconds=round(step[1] - forward[1], _DIGITS),
            tree_seconds=round(tree_seconds, _DIGITS),
            commit_seconds=round(_median(moves or [0.0]), _DIGITS),
        ),
        step_seconds={size: round(value, _DIGITS) for size, value in step.items()},
        forward_seconds={size: round(value, _DIGITS) for size, value in forward.items()},
    )


def draft_curves(
    drafts: list[Curve], head: HeadShape | None
) -> tuple[list[Curve], list[Curve] | None]:
    """What was measured of a draft (`BatchCurves.draft`) as ``draft_level`` and ``draft_reading``.
    For a head that drafts in one pass, it is that pass with all of the drawing."""
    if not drafts_in_one_pass(head):
        return drafts, None
    nothing = {"tokens": [1], "seconds": [_SHORTEST], "spread": None}
    return [curve.model_copy(update=nothing) for curve in drafts], drafts


def _level_curve(times: BatchTimes, first_pass: int, place: dict[str, int]) -> Curve:
    """Draft passes over one level, by its width (nodes per request)."""
    found: dict[int, dict[tuple[int, int], list[float]]] = {}
    for size, rounds in times.trees.items():
        for number, steps in enumerate(rounds):
            for step in steps:
                for width, seconds in step.levels()[first_pass:]:
                    by_round = found.setdefault(int(width), {})
                    by_round.setdefault((size, number), []).append(seconds)
    if not found:
        raise ProfileError(
            "no tree measured has a second level: give a larger size in --tokens (4 or more)"
        )
    by_width = [list(found[width].values()) for width in sorted(found)]
    return Curve(
        **place,
        tokens=sorted(found),
        seconds=[round(_median(map(_median, values)), _DIGITS) for values in by_width],
        spread=[_range_of([*chain.from_iterable(values)]) for values in by_width],
    )


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _range_of(values: Sequence[float]) -> float:
    low, high = np.percentile(values, [25, 75])
    return round(float(high - low), _DIGITS)
