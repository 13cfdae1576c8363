"""Decides how much of the tree an engine drafts, by what it measures while it serves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.adaptation.acceptance import FadingAcceptance
from sequoia_vllm.adaptation.state import AdaptationState, Workload
from sequoia_vllm.adaptation.step_times import FEWEST, StepTimes
from sequoia_vllm.metrics import TreeCounts
from sequoia_vllm.tree import Acceptance, TokenTree

logger = logging.getLogger("vllm.sequoia.adaptation")  # shown by vLLM's own handler

WORKLOADS: tuple[Workload, ...] = get_args(Workload)

# Times of a few dozen steps are known to about a percent: less is not clearly faster.
GAIN = 0.03
# Drafts that gain less than this are not worth their memory: fewer are as fast.
_WORTH_KEEPING = 0.01
_DECIDE_EVERY = 64  # steps
_COUNT_EVERY = 32  # steps: counting many trees takes as long as counting those of one step
_FIRST_TRIAL, _BETWEEN_FIRST_TRIALS = 24, 40  # steps; five sizes within the first 200, none first
# Steps from one trial of a size to its next; doubled by every trial that is lost.
_SHORTEST_WAIT, _LONGEST_WAIT = 400, 6400
# Share of the time that lost trials of a size may take; the next waits until they do not.
_MOST_LOST = 0.005
# A trial has so many trees, or steps; and is given up after so many steps of other kinds.
_TRIAL_TREES, _TRIAL_STEPS, _GIVE_UP = 24, 24, 96
# What is expected of so few trees is noise.
_FEWEST_TREES = 16
# So many weigh as much as two trials: after a pause these find it out if drafts are accepted.
_OLD_TREES = 48
# Share of requests that have trees: how much one step moves it.
_SHARE_FADES = 0.02


@dataclass(frozen=True)
class Step:
    """One step of an engine.

    Attributes:
        batch_size: Requests in it.
        drafts: Per request, as scheduled for this step and for the one before it; None: not a
            step of decoding alone, or the number has just changed.
        seconds: Since the step before it; None: the engine was idle, or it is not known.
        workload: Whether its requests are greedy.
        paths: Its verified trees, as bytes (`TreeCounts.from_bytes`).
    """

    batch_size: int
    drafts: int | None
    seconds: float | None
    workload: Workload
    paths: bytes = b""


@dataclass
class _Trial:
    """A few steps with another number of drafts; ``before``: those of the octave.

    Where nothing was drafted before, the draft first reads the requests' tokens, perhaps for
    some steps. ``all_steps`` and ``seconds`` count these, too.
    """

    drafts: int
    before: list[int]
    steps: int = 0
    seen: int = 0
    trees: int = 0
    most_trees: int = 0  # of one step
    all_steps: int = 0
    seconds: float = 0.0

    def has_more_trees(self, trees: int) -> bool:
        """Whether more requests draft than in any step before: some had still to be read."""
        more = trees > self.most_trees
        self.most_trees = max(trees, self.most_trees)
        return more

    @property
    def is_over(self) -> bool:
        enough = self.drafts == 0 or self.trees >= _TRIAL_TREES or self.seen >= _TRIAL_STEPS
        return (enough and self.seen > FEWEST) or self.steps >= _GIVE_UP


@dataclass(frozen=True)
class _Rate:
    """What is expected of a request, per step."""

    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return f"{self.tokens:.2f} tokens in {1e3 * self.seconds:.1f} ms"


@dataclass
class _Octave:
    """Batch sizes from a power of two up to the next: they are decided on together."""

    due: dict[int, int]
    steps: int = 0
    wait: dict[int, int] = field(default_factory=dict)
    trial: _Trial | None = None
    decided_for: Workload | None = None


class DraftController:
    """Follows an engine's steps, and keeps its table of drafts by batch size.

    Tokens per step are predicted for every prefix of the tree from acceptance by depth and child,
    for greedy and sampled requests apart; seconds per step are those that were seen. Other
    numbers of drafts, and none, are seen in short trials. So speculation that does not pay is off
    within 200 steps of steady load.

    Args:
        tree: The engine's tree.
        schedule: Drafts at batch sizes 0 (not used), 1, 2, ...: to begin with.
        most: The most drafts at these batch sizes.
        sizes: Numbers of drafts to choose among, besides the schedule's at a batch size and
            none; more than ``most`` is not chosen.

    Attributes:
        lookup: Drafts at batch sizes 0, 1, 2, ...: changed in place.
        decisions: How often it was changed, but for trials.
    """

    def __init__(
        self, tree: TokenTree, schedule: Sequence[int], most: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self.lookup = list(schedule)
        self.decisions = 0
        self._schedule = list(schedule)
        self._tree = tree
        self._most = most
        self._sizes = sizes
        self._acceptance = {workload: FadingAcceptance(tree) for workload in WORKLOADS}
        self._pending: dict[Workload, list[bytes]] = {workload: [] for workload in WORKLOADS}
        self._times = StepTimes()
        self._octaves: dict[int, _Octave] = {}
        self._with_trees = 1.0  # share of the requests that have trees where drafts are scheduled

    def observe(self, step: Step) -> None:
        """Takes one step, and changes `lookup` where that is clearly faster, or for a trial."""
        trees = self._note(step)
        known = self._octaves.get(step.batch_size.bit_length())
        if known is not None and known.trial is not None:
            known.trial.all_steps += 1
            known.trial.seconds += step.seconds or 0.0
        if step.drafts is None:
            return
        octave = self._octave(step.batch_size)
        octave.steps += 1
        if octave.trial is not None:
            self._go_on(octave, octave.trial, step, trees)
        elif due := [drafts for drafts, at in octave.due.items() if at <= octave.steps]:
            self._try(octave, min(due, key=octave.due.__getitem__), step)
        elif octave.steps % _DECIDE_EVERY == 0 or step.workload != octave.decided_for:
            self._decide(octave, step)

    def speedup(self, batch_size: int, workload: Workload) -> float | None:
        """Speed with as many drafts as are chosen now over that with none; None: not known."""
        rates = self._rates(batch_size, workload)
        current, none = rates.get(self.lookup[batch_size]), rates.get(0)
        return None if current is None or none is None else current.speed / none.speed

    # -- what was seen ---------------------------------------------------------------------

    def _note(self, step: Step) -> int:
        """Returns the step's verified trees."""
        trees = len(step.paths) // TreeCounts.path_bytes(self._tree)
        if step.paths:
            self._pending[step.workload].append(step.paths)
            if len(self._pending[step.workload]) >= _COUNT_EVERY:
                self._count_pending()
        if step.drafts is None:
            return trees
        if step.drafts > 0:
            share = min(trees / step.batch_size, 1.0)
            self._with_trees += (share - self._with_trees) * _SHARE_FADES
        if step.seconds is not None:
            self._times.add(step.drafts, step.batch_size, step.seconds)
        return trees

    def _count_pending(self) -> None:
        for workload, paths in self._pending.items():
            if paths:
                counts = TreeCounts.from_bytes(self._tree, b"".join(paths))
                self._acceptance[workload].add(counts)
                paths.clear()

    # -- trials ------------------------------------------------------------------------------

    def _octave(self, batch_size: int) -> _Octave:
        key = batch_size.bit_length()
        if key not in self._octaves:
            current = self.lookup[batch_size]
            others = [drafts for drafts in self._sizes_of(batch_size) if drafts != current]
            # None first; then the nearest.
            others.sort(key=lambda drafts: (drafts > 0, abs(drafts - current)))
            wait = _BETWEEN_FIRST_TRIALS if current > 0 else _SHORTEST_WAIT
            first = _FIRST_TRIAL if current > 0 else _SHORTEST_WAIT
            due = {drafts: first + place * wait for place, drafts in enumerate(others)}
            for drafts in others:
                # What an earlier engine measured can wait; but not whether to draft at all.
                if drafts > 0 and self._times.known(drafts, batch_size) is not None:
                    due[drafts] += _SHORTEST_WAIT
            self._octaves[key] = _Octave(due)
        return self._octaves[key]

    def _try(self, octave: _Octave, drafts: int, step: Step) -> None:
        batch_size = step.batch_size
        if drafts == self.lookup[batch_size] or drafts > self._most[batch_size]:
            octave.due[drafts] = octave.steps + _LONGEST_WAIT
            return
        if not self._could_pay(drafts, step):
            octave.due[drafts] = octave.steps + _SHORTEST_WAIT
            return
        if self.lookup[batch_size] == 0 and self._times.known(drafts, batch_size) is not None:
            self._count_pending()
            self._acceptance[step.workload].fade(_OLD_TREES)  # from before the pause
        self._times.forget(drafts, batch_size)
        octave.trial = _Trial(drafts, before=self.lookup[self._batch_sizes(batch_size)])
        self._set(batch_size, drafts)

    def _go_on(self, octave: _Octave, trial: _Trial, step: Step, trees: int) -> None:
        trial.steps += 1
        if step.drafts == trial.drafts:
            if trial.has_more_trees(trees):
                self._times.forget(trial.drafts, step.batch_size)
                trial.seen = 0
            trial.seen += 1
            trial.trees += trees
        if not trial.is_over:
            return
        octave.trial = None
        self.lookup[self._batch_sizes(step.batch_size)] = trial.before
        self._count_pending()  # the trial's own
        self._decide(octave, step)
        current = self.lookup[step.batch_size]
        if current != trial.drafts:
            wait = octave.wait.get(trial.drafts, _SHORTEST_WAIT)
            wait = min(max(wait, self._steps_to_make_up(trial, step)), _LONGEST_WAIT)
            octave.wait[trial.drafts] = min(2 * wait, _LONGEST_WAIT)
            octave.due[trial.drafts] = octave.steps + wait
            if current == 0:
                self._try_only_the_best(octave, step)

    def _steps_to_make_up(self, trial: _Trial, step: Step) -> int:
        """After so many steps what the trial lost is no more than `_MOST_LOST` of their time."""
        rates = self._rates(step.batch_size, step.workload)
        tried, current = rates.get(trial.drafts), rates.get(self.lookup[step.batch_size])
        if tried is None or current is None:
            return 0
        tokens = trial.all_steps + trial.seen * (tried.tokens - 1)
        lost = trial.seconds - tokens / current.speed
        return int(lost / (_MOST_LOST * current.seconds))

    def _could_pay(self, drafts: int, step: Step) -> bool:
        """Whether so many drafts would be faster if they took no longer than fewer, as measured."""
        rates = self._rates(step.batch_size, step.workload)
        current = rates.get(self.lookup[step.batch_size])
        fewer = [rate.seconds for tried, rate in rates.items() if tried < drafts]
        if current is None or not fewer:
            return True
        return self._tokens(step.workload)[drafts] / max(fewer) > current.speed

    def _try_only_the_best(self, octave: _Octave, step: Step) -> None:
        """Where nothing pays, all that trials could find is that something pays again."""
        rates = self._rates(step.batch_size, step.workload)
        rivals = [drafts for drafts in rates if drafts > 0]
        open_ones = octave.due.keys() - {0, *rivals}
        if rivals and not any(self._could_pay(drafts, step) for drafts in open_ones):
            best = max(rivals, key=lambda drafts: rates[drafts].speed)
            octave.due = {best: octave.steps + octave.wait.get(best, _SHORTEST_WAIT)}

    # -- decisions ---------------------------------------------------------------------------

    def _decide(self, octave: _Octave, step: Step) -> None:
        """Goes over to more drafts that are clearly faster, or to fewer that are as fast."""
        octave.decided_for = step.workload
        batch_size, current = step.batch_size, self.lookup[step.batch_size]
        rates = self._rates(batch_size, step.workload)
        if current not in rates:
            return
        enough = max(rate.speed for rate in rates.values()) / (1 + _WORTH_KEEPING)
        best = min(drafts for drafts in rates if rates[drafts].speed >= enough)
        if best >= current and rates[best].speed <= rates[current].speed * (1 + GAIN):
            return
        self._set(batch_size, best)
        self.decisions += 1
        octave.wait.clear()
        others = [drafts for drafts in self._sizes_of(batch_size) if drafts != best]
        # First trials come early, of few drafts first: their time may say that more cannot pay.
        others.sort(key=rates.__contains__)
        for place, drafts in enumerate(others):
            wait = _SHORTEST_WAIT if drafts in rates else _FIRST_TRIAL
            octave.due[drafts] = octave.steps + wait + place * _BETWEEN_FIRST_TRIALS
        logger.info(
            "Sequoia: %d drafts instead of %d at batch size %d: %s instead of %s per request (%s)",
            best, current, batch_size, rates[best], rates[current], step.workload,
        )  # fmt: skip

    def _rates(self, batch_size: int, workload: Workload) -> dict[int, _Rate]:
        """By drafts, of those whose step times are known; nothing where acceptance is not."""
        acceptance = self._acceptance[workload]
        if acceptance.trees < _FEWEST_TREES:
            return {}
        tokens = self._tokens(workload)
        sizes = {*self._sizes_of(batch_size), self.lookup[batch_size]}
        possible = [drafts for drafts in sizes if drafts <= self._most[batch_size]]
        times = self._times.known_growing(possible, batch_size)
        return {drafts: _Rate(float(tokens[drafts]), times[drafts]) for drafts in times}

    def _tokens(self, workload: Workload) -> NDArray[np.float64]:
        """Tokens that a request is expected to gain per step with 0, 1, 2, ... drafts."""
        expected = self._acceptance[workload].expected_tokens()
        return 1 + self._with_trees * (expected - 1)

    def _sizes_of(self, batch_size: int) -> list[int]:
        """Numbers of drafts to choose among at this batch size, ascending."""
        return sorted({0, *self._sizes, self._schedule[batch_size]})

    def _batch_sizes(self, batch_size: int) -> slice:
        """The batch sizes that are decided on together with this one."""
        first = 1 << (batch_size.bit_length() - 1)
        return slice(first, min(2 * first, len(self.lookup)))

    def _set(self, batch_size: int, drafts: int) -> None:
        sizes = self._batch_sizes(batch_size)
        self.lookup[sizes] = [min(drafts, most) for most in self._most[sizes]]

    # -- across restarts -----------------------------------------------------------------------

    def state(self) -> AdaptationState:
        """What was learned."""
        self._count_pending()
        lookup = list(self.lookup)
        for key, octave in self._octaves.items():
            if octave.trial is not None:
                lookup[self._batch_sizes(1 << (key - 1))] = octave.trial.before
        return AdaptationState(
            parents=list(self._tree.parents),
            schedule=self._schedule,
            lookup=lookup,
            acceptance={name: fading.state() for name, fading in self._acceptance.items()},
            times=self._times.to_list(),
        )

    def restore(self, state: AdaptationState) -> bool:
        """Goes on from what an earlier engine learned.

        Returns:
            Whether it was of this tree; of another one only acceptance is taken over, where
            this one has no such children.
        """
        for workload in WORKLOADS:
            known = state.acceptance[workload]
            prior = Acceptance.of(known.vector)
            self._acceptance[workload] = FadingAcceptance(self._tree, prior, known.vector_trees)
        if tuple(state.parents) != self._tree.parents:
            return False
        for workload in WORKLOADS:
            self._acceptance[workload].restore(state.acceptance[workload])
        self._times.restore(state.times)
        same_limits = state.schedule == self._schedule
        if same_limits and len(state.lookup) == len(self.lookup):
            self.lookup[:] = map(min, state.lookup, self._most)
        return True
