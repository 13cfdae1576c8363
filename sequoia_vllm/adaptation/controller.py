"""Decides how much of the tree an engine drafts, by what it measures while it serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Sequence
from math import inf, nan
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.adaptation.acceptance import FadingAcceptance
from sequoia_vllm.adaptation.state import AdaptationState, Workload
from sequoia_vllm.adaptation.step_times import FEWEST, SETTLED, UNSETTLED, StepTimes
from sequoia_vllm.adaptation.trials import Octave, Step, Trial
from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.tree import Acceptance, TokenTree

logger = logging.getLogger("vllm.sequoia.adaptation")  # shown by vLLM's own handler

WORKLOADS: tuple[Workload, ...] = get_args(Workload)

# Times of a few dozen steps are known to about a percent: less is not clearly faster.
GAIN = 0.02
# Drafts that gain less than this are not worth their memory: fewer are as fast.
_WORTH_KEEPING = 0.01
# Trials whose speed differs by less go on for a while: they cost little.
_NEAR = 0.08
_DECIDE_EVERY = 64  # steps
_COMPARE_EVERY = 8  # steps of a trial
_COUNT_EVERY = 32  # steps: counting many trees takes as long as counting those of one step
_FIRST_TRIAL, _BETWEEN_FIRST_TRIALS = 24, 40  # steps; five sizes within the first 200, none first
# Steps from one trial of a size to its next; doubled by every trial that is lost.
_SHORTEST_WAIT, _LONGEST_WAIT = 400, 6400
# Share of the time that lost trials of a size may take; the next waits until they do not.
_MOST_LOST = 0.005
# What is expected of so few trees is noise.
_FEWEST_TREES = 16
# So many weigh as much as two trials: after a pause these find it out if drafts are accepted.
_OLD_TREES = 48
# How much one step moves the share of requests that have trees, and the mix that is served.
_SHARE_FADES, _MIX_FADES = 0.02, 0.01
# After preemptions: steps until trees may shrink again, and until they may grow.
_BETWEEN_SHRINKING, _CALM = 16, 1000
_MOST_PROMPTS = 0.9  # share of the time that prompts may take, by their prices
_SAY_EVERY = 60.0  # seconds, of one octave's decisions


class DraftController:
    """Follows an engine's steps, and keeps its table of drafts by batch size.

    Tokens per step are predicted for every prefix of the tree from acceptance by depth and child,
    for greedy and sampled requests apart. Seconds per step come from `StepTimes`, at the contexts
    and with the prompts that are served of late. Other numbers of drafts, and none, are seen in
    short trials. So speculation that does not pay is off within 200 steps of steady load.

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
        self._most, self._whole = list(most), list(most)  # the former is less after preemptions
        self._steps = self._shrunk = 0
        self._sizes = sizes
        self._acceptance = {workload: FadingAcceptance(tree) for workload in WORKLOADS}
        self._pending: dict[Workload, list[bytes]] = {workload: [] for workload in WORKLOADS}
        self._times = StepTimes()
        self._octaves: dict[int, Octave] = {}
        self._with_trees = 1.0  # share of the requests that have trees where drafts are scheduled
        self._undrafted = 0  # steps since the last one with drafts
        self._context = 0.0  # tokens of a request
        self._mixed = 0.0  # share of steps that read prompts
        self._prompts, self._seconds = 0.0, 1e-9  # a step's tokens of prompts, and its time

    def observe(self, step: Step) -> None:
        """Takes one step, and changes `lookup` where that is clearly faster, or for a trial."""
        trees = self._note(step)
        known = self._octaves.get(step.batch_size.bit_length())
        if known is not None and known.trial is not None:
            known.trial.all_steps += 1
            known.trial.seconds += step.seconds or 0.0
        self._follow_preemptions(step)
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
        if octave.has_news:
            self._say(octave, step)

    def speedup(self, batch_size: int, workload: Workload) -> float | None:
        """Speed with as many drafts as are chosen now over that with none; None: not known."""
        speeds = self._speeds(batch_size, workload)
        drafts = self.lookup[batch_size]
        return speeds[drafts] / speeds[0] if {0, drafts} <= speeds.keys() else None

    # -- what was seen ---------------------------------------------------------------------

    def _note(self, step: Step) -> int:
        """Returns the step's verified trees."""
        trees = len(step.paths) // TreeCounts.path_bytes(self._tree)
        if step.paths:
            self._pending[step.workload].append(step.paths)
            if len(self._pending[step.workload]) >= _COUNT_EVERY:
                self._count_pending()
        self._steps += 1
        moves = max(_MIX_FADES, 1 / self._steps)
        self._context += (step.context / step.batch_size - self._context) * moves
        if step.seconds is not None:
            self._prompts += (step.prompts - self._prompts) * moves
            self._mixed += ((step.prompts > 0) - self._mixed) * moves
            self._seconds += (step.seconds - self._seconds) * moves
        if step.drafts is None:
            return trees
        self._undrafted = 0 if step.drafts > 0 else self._undrafted + 1
        if step.drafts > 0:
            share = min(trees / step.batch_size, 1.0)
            self._with_trees += (share - self._with_trees) * _SHARE_FADES
        if step.seconds is not None:
            drafts = UNSETTLED if 0 < self._undrafted <= SETTLED else step.drafts
            self._times.add(drafts, step.batch_size, step.seconds, step.prompts, step.context)
        return trees

    def _count_pending(self) -> None:
        for workload, paths in self._pending.items():
            if paths:
                counts = TreeCounts.from_bytes(self._tree, b"".join(paths))
                self._acceptance[workload].add(counts)
                paths.clear()

    def _follow_preemptions(self, step: Step) -> None:
        """Takes drafts to the next smaller size where requests lost their cache, for a while.

        Where they lose it without drafts, too, drafts are not the cause.
        """
        since, drafts = self._steps - self._shrunk, self.lookup[step.batch_size]
        is_less = self._most != self._whole
        if is_less and since > _CALM:
            self._most[:] = self._whole
        elif step.preempted and since > _BETWEEN_SHRINKING and drafts > 0:
            self._shrunk = self._steps
            first = self._batch_sizes(step.batch_size).start
            smaller = max(size for size in self._sizes_of(step.batch_size) if size < drafts)
            self._most[first:] = [min(most, smaller) for most in self._most[first:]]
            self.lookup[:] = map(min, self.lookup, self._most)
            for octave in self._octaves.values():
                octave.trial = None
        elif step.preempted and since > _BETWEEN_SHRINKING and is_less:
            self._most[:], self._shrunk = self._whole, self._steps + _LONGEST_WAIT

    # -- trials ------------------------------------------------------------------------------

    def _octave(self, batch_size: int) -> Octave:
        key = batch_size.bit_length()
        if key not in self._octaves:
            smaller = [known for known in self._octaves if known < key]
            if smaller:  # where drafts do not pay they do not pay in larger batches
                most = self._chosen(max(smaller))[-1]
                self._set(batch_size, min(self.lookup[batch_size], most))
            # What an earlier engine measured can wait; but not whether to draft at all.
            known = [d for d in self._sizes if self._times.known(d, batch_size) is not None]
            drafts = self.lookup[batch_size] > 0
            self._octaves[key] = octave = Octave({})
            first = max(_FIRST_TRIAL // batch_size, FEWEST) if drafts else _SHORTEST_WAIT
            self._plan_trials(octave, batch_size, known, first)
        return self._octaves[key]

    def _plan_trials(
        self, octave: Octave, batch_size: int, known: Container[int], first: int
    ) -> None:
        """Tries sizes that are not known after ``first`` steps, and others later."""
        others = [
            drafts for drafts in self._sizes_of(batch_size) if drafts != self.lookup[batch_size]
        ]
        # Few drafts come first: their time may say that more cannot pay.
        others.sort(key=known.__contains__)
        for place, drafts in enumerate(others):
            wait = _SHORTEST_WAIT if drafts in known else first
            due = octave.steps + wait + place * _BETWEEN_FIRST_TRIALS
            if drafts in known and octave.due.get(drafts, 0) > octave.steps:
                due = min(due, octave.due[drafts])
            octave.due[drafts] = due

    def _chosen(self, key: int) -> list[int]:
        """Drafts of an octave's batch sizes, but for a trial."""
        trial = self._octaves[key].trial
        return self.lookup[self._batch_sizes(1 << (key - 1))] if trial is None else trial.before

    def _try(self, octave: Octave, drafts: int, step: Step) -> None:
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
        octave.trial = Trial(drafts, before=self.lookup[self._batch_sizes(batch_size)])
        self._set(batch_size, drafts)

    def _go_on(self, octave: Octave, trial: Trial, step: Step, trees: int) -> None:
        trial.steps += 1
        if step.drafts == trial.drafts:
            if trial.before[0] == 0 and trial.has_more_trees(trees / step.batch_size):
                self._times.forget(trial.drafts, step.batch_size)
                trial.seen = 0
            trial.seen += 1
            trial.trees += trees
        if not trial.is_over(is_near=False):
            return
        goes_on = trial.seen % _COMPARE_EVERY or self._is_near(trial, step)
        if goes_on and not trial.is_over(is_near=True):
            return
        octave.trial = None
        sizes = self._batch_sizes(step.batch_size)
        self.lookup[sizes] = map(min, trial.before, self._most[sizes])
        self._count_pending()  # the trial's own
        self._decide(octave, step)
        current = self.lookup[step.batch_size]
        if current != trial.drafts:
            wait = octave.wait.get(trial.drafts, _SHORTEST_WAIT)
            wait = min(max(wait, self._steps_to_make_up(trial, step)), _LONGEST_WAIT)
            octave.wait[trial.drafts] = min(2 * wait, _LONGEST_WAIT)
            octave.due[trial.drafts] = octave.steps + wait

    def _is_near(self, trial: Trial, step: Step) -> bool:
        """Whether a trial is about as fast as what was drafted before it."""
        self._count_pending()
        speeds = self._speeds(step.batch_size, step.workload)
        if not {trial.drafts, trial.before[0]} <= speeds.keys():
            return False
        return abs(speeds[trial.drafts] / speeds[trial.before[0]] - 1) < _NEAR

    def _steps_to_make_up(self, trial: Trial, step: Step) -> int:
        """After so many steps what the trial lost is no more than `_MOST_LOST` of their time."""
        speeds, drafts = self._speeds(step.batch_size, step.workload), self.lookup[step.batch_size]
        if not {trial.drafts, drafts} <= speeds.keys():
            return 0
        gained = self._tokens(step.workload)
        tokens = trial.all_steps + trial.seen * (gained[trial.drafts] - 1)
        lost = trial.seconds - tokens / speeds[drafts]
        return int(lost / (_MOST_LOST * gained[drafts] / speeds[drafts]))

    def _could_pay(self, drafts: int, step: Step) -> bool:
        """Whether so many drafts would be faster if they took no longer than fewer, as measured.

        Where nothing pays, of those that were measured only the best could.
        """
        speeds, current = self._speeds(step.batch_size, step.workload), self.lookup[step.batch_size]
        rivals = speeds.keys() - {0}
        if current == 0 and drafts in rivals and drafts != max(rivals, key=speeds.__getitem__):
            return False
        tokens = self._tokens(step.workload)
        fewer = [tokens[tried] / speeds[tried] for tried in speeds if tried < drafts]
        if current not in speeds or not fewer:
            return True
        return bool(tokens[drafts] / max(fewer) > speeds[current])

    # -- decisions ---------------------------------------------------------------------------

    def _decide(self, octave: Octave, step: Step) -> None:
        """Goes over to more drafts that are clearly faster, or to fewer that are as fast."""
        octave.decided_for = step.workload
        batch_size, current = step.batch_size, self.lookup[step.batch_size]
        speeds = self._speeds(batch_size, step.workload)
        if current not in speeds:
            return
        enough = max(speeds.values()) / (1 + _WORTH_KEEPING)
        best = min(drafts for drafts in speeds if speeds[drafts] >= enough)
        if best >= current and speeds[best] <= speeds[current] * (1 + GAIN):
            return
        self._set(batch_size, best)
        self.decisions += 1
        octave.has_news = True
        octave.wait.clear()
        first = _FIRST_TRIAL if best > 0 else SETTLED + _FIRST_TRIAL
        self._plan_trials(octave, batch_size, speeds, first)

    def _say(self, octave: Octave, step: Step) -> None:
        """Logs what is drafted now, unless it did so a moment ago or nothing has changed."""
        now, drafts = time.monotonic(), self.lookup[step.batch_size]
        if octave.trial is not None or now - octave.said_at < _SAY_EVERY:
            return
        octave.has_news = False
        if drafts == octave.said:
            return
        octave.said, octave.said_at = drafts, now
        speeds = self._speeds(step.batch_size, step.workload)
        plain, shown = speeds.pop(0, nan), speeds.get(drafts, max(speeds.values(), default=nan))
        logger.info(
            "Sequoia: %s at batch %d (plain %.0f tokens/s, with drafts %.0f)",
            f"{drafts} draft{'s' * (drafts > 1)}" if drafts > 0 else "speculation off",
            step.batch_size, step.batch_size * plain, step.batch_size * shown,
        )  # fmt: skip

    def _speeds(self, batch_size: int, workload: Workload) -> dict[int, float]:
        """Tokens per second of a request, by drafts; only where acceptance and times are known.

        Prompts arrive at their own rate, whatever is drafted: tokens come in the time that they
        leave. Where there are trees they leave less, as the draft reads them, too. A pass over
        fewer tokens is not slower: steps that seem so were disturbed, and take as long.
        """
        acceptance = self._acceptance[workload]
        if acceptance.trees < _FEWEST_TREES:
            return {}
        tokens = self._tokens(workload)
        arriving = self._prompts / self._seconds  # tokens of prompts a second
        speeds, least = {}, inf
        for drafts in sorted({*self._sizes_of(batch_size), self.lookup[batch_size]}, reverse=True):
            context = self._context * batch_size
            seconds = self._times.known(drafts, batch_size, context, self._mixed)
            if seconds is not None and drafts <= self._most[batch_size]:
                least = min(seconds, least)
                left = 1 - min(arriving * self._times.prompt_price(drafts), _MOST_PROMPTS)
                speeds[drafts] = float(tokens[drafts]) * left / least
        return speeds

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
        for key in self._octaves:
            lookup[self._batch_sizes(1 << (key - 1))] = self._chosen(key)
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
