"""Decides how much of the tree an engine drafts, from what it measures while it serves."""

import logging
import time
from collections.abc import Sequence
from math import inf, nan

from sequoia_vllm.adaptation.speeds import WORKLOADS, Speeds
from sequoia_vllm.adaptation.state import AdaptationState, FadingAcceptance, Workload
from sequoia_vllm.adaptation.step_times import FEWEST
from sequoia_vllm.adaptation.trials import Octave, Step, Trial
from sequoia_vllm.tree import Acceptance, TokenTree

logger = logging.getLogger("vllm.sequoia.adaptation")  # shown by vLLM's own handler

# A few dozen steps give times to about 1 %: a smaller gain may be noise.
GAIN = 0.02
# Drafts that gain less than this are not worth their memory: fewer are as fast.
_WORTH_KEEPING = 0.01
# A trial's best possible speed must exceed the present one by this factor: bounds are optimistic.
# We try nothing beyond a number of drafts that reached less than `_NEARLY` of the present speed.
_HOPE, _NEARLY = 1.05, 0.85
# Trials within this relative distance of the present speed go on: they cost little.
_NEAR = 0.08
# Steps between decisions: usually, and until a new choice has been measured.
_DECIDE_EVERY, _DECIDE_SOON = 64, 1
_COMPARE_EVERY = 4  # steps of a trial
_MORE = 0.2  # share of the requests: with so many more trees a trial's steps count anew
_AT_ONCE, _FIRST_TRIAL, _BETWEEN_FIRST_TRIALS = 2, 16, 16  # steps
# A number that was left after fewer steps is tried again soon: the first ones may be slow.
_FIRM, _SOON = 16, 8
# Steps from one trial of a size to its next; every lost trial doubles them.
_SHORTEST_WAIT, _LONGEST_WAIT = 400, 6400
_SECOND_LOOK = 64  # steps until plain ones are timed again: an engine's first may be slow
# Share of the time that lost trials of a size may cost; the next trial waits until it is less.
_MOST_LOST = 0.005
# Weight of old trees after a pause: two trials outweigh it if acceptance has changed.
_OLD_TREES = 48
# Steps after preemptions until trees may shrink again, and until they may grow.
_BETWEEN_SHRINKING, _CALM = 16, 1000
_SAY_EVERY = 60.0  # seconds between log lines about one octave


class DraftController:
    """Follows an engine's steps, and keeps its table of drafts by batch size (docs/internals.md,
    Adaptation). Under steady load, speculation that does not pay is off within 200 steps.

    Args:
        tree: The engine's tree.
        schedule: Initial drafts at batch sizes 0 (not used), 1, 2, ...; kept as they are.
        most: The most drafts at these batch sizes.
        sizes: Numbers of drafts to choose among, besides 0 and the schedule's, up to ``most``.

    Attributes:
        lookup: Drafts at batch sizes 0, 1, 2, ...; changed in place.
        decisions: How often ``lookup`` changed, trials not counted.
    """

    def __init__(
        self, tree: TokenTree, schedule: Sequence[int], most: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self.lookup = list(schedule)
        self.decisions = 0
        self.schedule = list(schedule)
        self._first = self.lookup[:]  # what batch sizes begin with that were not seen
        self._tree = tree
        self._most, self._whole = list(most), list(most)  # the former is less after preemptions
        self._steps = self._shrunk = 0
        self._sizes = sizes
        self._known = Speeds(tree)
        self._octaves: dict[int, Octave] = {}

    def observe(self, step: Step) -> None:
        """Takes one step; changes `lookup` for a trial, or where that is clearly faster."""
        trees = self._known.note(step)
        self._steps += 1
        known = self._octaves.get(step.batch_size.bit_length())
        if known is not None and known.trial is not None:
            known.trial.all_steps += 1
            known.trial.seconds += step.seconds or 0.0
        self._follow_preemptions(step)
        if step.drafts is None:
            return
        octave = self._octave(step)
        octave.steps += 1
        if octave.trial is not None:
            self._go_on(octave, octave.trial, step, trees)
            return
        drafts = self.lookup[step.batch_size]
        if octave.decide_at <= octave.steps or step.workload != octave.decided_for:
            self._decide(octave, step)
        due, size = min((at, size) for size, at in octave.due.items())
        if due <= octave.steps and drafts == self.lookup[step.batch_size]:
            self._try(octave, size, step)

    @property
    def speedup(self) -> float | None:
        """Speed relative to plain decoding in the last seconds, see `Speeds`; None: not known."""
        return self._known.gain

    def decided(self, batch_size: int) -> int:
        """Drafts at this batch size, as before the trial if there is one."""
        octave = self._octaves.get(batch_size.bit_length())
        if octave is None or octave.trial is None:
            return self.lookup[batch_size]
        return octave.trial.before[batch_size - self._batch_sizes(batch_size).start]

    def _follow_preemptions(self, step: Step) -> None:
        """Goes to the next smaller size for a while after requests were preempted, until some are
        without drafts: then drafts are not the cause."""
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

    def begin_with(self, rows: int) -> None:
        """Lowers initial drafts to ``rows`` nodes in all trees of a batch, or to the fewest."""
        for batch_size in range(1, len(self.lookup)):
            sizes = [size for size in self._sizes_of(batch_size) if size > 0]
            fitting = [size for size in sizes if batch_size * (1 + size) <= rows] or sizes[:1]
            self.lookup[batch_size] = min(self.lookup[batch_size], max(fitting, default=0))
        self._first[:] = self.lookup

    # -- trials ------------------------------------------------------------------------------

    def _octave(self, step: Step) -> Octave:
        batch_size = step.batch_size
        key = batch_size.bit_length()
        if key not in self._octaves:
            # Whether to draft at all is tried at once; what an earlier engine measured can wait.
            drafts = self.lookup[batch_size]
            first = _AT_ONCE if drafts > 0 else _SHORTEST_WAIT
            self._octaves[key] = Octave({0: first})
            if drafts == 0:
                self._plan_trials(self._octaves[key], step, first)
        return self._octaves[key]

    def _plan_trials(self, octave: Octave, step: Step, first: int) -> None:
        """Plans trials, the likely fastest size first: of sizes not yet known after ``first``
        steps, others later."""
        batch_size = step.batch_size
        others = [size for size in self._sizes_of(batch_size) if size != self.lookup[batch_size]]
        others.sort(key=lambda size: -self._known.likely(size, batch_size, step.workload))
        for place, drafts in enumerate(others):
            is_known = self._known.times.known(drafts, batch_size) is not None
            wait = _wait(octave, drafts) if is_known else 0
            octave.due[drafts] = octave.steps + first + wait + place * _BETWEEN_FIRST_TRIALS

    def _try(self, octave: Octave, drafts: int, step: Step) -> None:
        batch_size = step.batch_size
        if drafts == self.lookup[batch_size] or drafts > self._most[batch_size]:
            octave.due[drafts] = octave.steps + _LONGEST_WAIT
            return
        if not self._could_pay(drafts, step):
            octave.due[drafts] = octave.steps + _SHORTEST_WAIT
            return
        if self.lookup[batch_size] == 0 and self._known.times.known(drafts, batch_size) is not None:
            self._known.fade(step.workload, _OLD_TREES)  # from before the pause
        self._known.times.forget(drafts, batch_size)
        octave.trial = Trial(drafts, before=self.lookup[self._batch_sizes(batch_size)])
        self._set(batch_size, drafts)

    def _go_on(self, octave: Octave, trial: Trial, step: Step, trees: int) -> None:
        trial.steps += 1
        if step.drafts == trial.drafts:
            share = trees / step.batch_size
            if trial.before[0] == 0 and share > trial.share + _MORE:
                self._known.times.forget(trial.drafts, step.batch_size)
                trial.seen = 0
            trial.share = max(share, trial.share)
            trial.seen += 1
            trial.trees += trees
        if not trial.is_over(is_near=False):
            return
        goes_on = trial.seen % _COMPARE_EVERY or self._is_near(trial, step)
        if goes_on and not trial.is_over(is_near=True):
            return
        octave.trial = None
        octave.plain_trials += trial.drafts == 0
        sizes = self._batch_sizes(step.batch_size)
        self.lookup[sizes] = map(min, trial.before, self._most[sizes])
        self._known.count()  # the trial's own
        self._decide(octave, step)
        current = self.lookup[step.batch_size]
        if current != trial.drafts:
            wait = _wait(octave, trial.drafts)
            if wait != _SECOND_LOOK:  # what the first look lost is not to be believed either
                wait = min(max(wait, self._steps_to_make_up(trial, step)), _LONGEST_WAIT)
                octave.wait[trial.drafts] = min(2 * wait, _LONGEST_WAIT)
            octave.due[trial.drafts] = octave.steps + wait

    def _is_near(self, trial: Trial, step: Step) -> bool:
        """Whether a trial is about as fast as the drafts before it, or its time not yet known."""
        if self._known.times.known(trial.drafts, step.batch_size) is None:
            return True
        self._known.count()
        speeds = self._speeds(step.batch_size, step.workload)
        if not {trial.drafts, trial.before[0]} <= speeds.keys():
            return False
        return abs(speeds[trial.drafts] / speeds[trial.before[0]] - 1) < _NEAR

    def _steps_to_make_up(self, trial: Trial, step: Step) -> int:
        """Steps until the time lost in the trial is at most `_MOST_LOST` of the time since."""
        speeds, drafts = self._speeds(step.batch_size, step.workload), self.lookup[step.batch_size]
        if not {trial.drafts, drafts} <= speeds.keys():
            return 0
        gained = self._known.tokens(step.workload)
        tokens = trial.all_steps + trial.seen * (gained[trial.drafts] - 1)
        lost = trial.seconds - tokens / speeds[drafts]
        return int(lost / (_MOST_LOST * gained[drafts] / speeds[drafts]))

    def _could_pay(self, drafts: int, step: Step) -> bool:
        """Whether so many drafts could be faster, given the times of other steps. While speculation
        is off, one number only: the smallest unseen one if any could pay, else the best that nearly
        pays, else the smallest. It shows current acceptance at the least cost."""
        batch_size, current = step.batch_size, self.lookup[step.batch_size]
        ranges = self._ranges(batch_size, step.workload)
        if drafts == 0 or current not in ranges:
            return True
        now = ranges[current][0]
        seen = {size: slow for size, (slow, fast) in ranges.items() if slow == fast}

        def is_open(size: int) -> bool:
            between = (seen[d] for d in seen if current < d < size or size < d < current)
            fastest = self._known.fastest(size, batch_size, step.workload)
            return fastest > now * _HOPE and min(between, default=now) > now * _NEARLY

        if current > 0:
            return is_open(drafts)
        sizes = sorted({*ranges, drafts} - {0})
        near = [size for size in sizes if seen.get(size, 0) > now * _NEARLY]
        usual = max(near, key=seen.__getitem__, default=sizes[0])
        unseen = [size for size in sizes if size not in seen]
        return drafts == (unseen[0] if any(map(is_open, unseen)) else usual)

    # -- decisions ---------------------------------------------------------------------------

    def _decide(self, octave: Octave, step: Step) -> None:
        """Switches to more drafts if clearly faster, or to fewer if as fast."""
        octave.decided_for, octave.decide_at = step.workload, octave.steps + _DECIDE_SOON
        current = self.lookup[step.batch_size]
        ranges = self._ranges(step.batch_size, step.workload)
        slow, fast = ranges.get(current, (0.0, inf))
        if fast == inf:
            return
        if len(octave.due) == 1:  # only the trial of no drafts is planned so far
            plain = dict(octave.due)
            self._plan_trials(octave, step, _AT_ONCE)
            octave.due.update(plain)
        if slow == fast:
            octave.decide_at = octave.steps + _DECIDE_EVERY
        speeds = {current: fast}
        for drafts, (least, most) in ranges.items():
            # While the present speed is not known, only a certain gain counts.
            likely = least
            if slow == fast and least < most:
                likely = self._known.likely(drafts, step.batch_size, step.workload)
            if least == most or likely > fast * (1 + GAIN):
                speeds.setdefault(drafts, likely)
        enough = max(speeds.values()) / (1 + _WORTH_KEEPING)
        best = min(drafts for drafts in speeds if speeds[drafts] >= enough)
        if best >= current and speeds[best] <= fast * (1 + GAIN):
            if slow == fast and octave.has_news:
                self._say(octave, step, ranges)
            return
        self._set(step.batch_size, best)
        # Drafts cost more in larger batches: those not seen yet begin with no more.
        for larger in range(self._batch_sizes(step.batch_size).stop, len(self.lookup)):
            if larger.bit_length() in self._octaves:
                break
            self.lookup[larger] = min(best, self._first[larger], self._most[larger])
        self.decisions += 1
        octave.has_news = True
        octave.wait.clear()
        octave.decide_at = octave.steps + 2 * FEWEST
        self._plan_trials(octave, step, _FIRST_TRIAL)
        if self._known.times.evidence(current, step.batch_size) < _FIRM:
            octave.due[current] = octave.steps + _SOON

    def _say(self, octave: Octave, step: Step, ranges: dict[int, tuple[float, float]]) -> None:
        """Logs the present number of drafts if it changed, at most once in `_SAY_EVERY`."""
        now, drafts = time.monotonic(), self.lookup[step.batch_size]
        seen = {size: slow for size, (slow, fast) in ranges.items() if slow == fast}
        if now - octave.said_at < _SAY_EVERY or 0 not in seen:
            return
        octave.has_news = False
        if drafts == octave.said:
            return
        octave.said, octave.said_at = drafts, now
        plain = seen.pop(0)
        shown = seen.get(drafts, max(seen.values(), default=nan))
        logger.info(
            "Sequoia: %s at batch %d (plain %.0f tokens/s, with drafts %.0f)",
            f"{drafts} draft{'s' * (drafts > 1)}" if drafts > 0 else "speculation off",
            step.batch_size, step.batch_size * plain, step.batch_size * shown,
        )  # fmt: skip

    def _ranges(self, batch_size: int, workload: Workload) -> dict[int, tuple[float, float]]:
        """`Speeds.ranges` of the numbers that may be drafted."""
        sizes = {*self._sizes_of(batch_size), self.lookup[batch_size]}
        sizes = {size for size in sizes if size <= self._most[batch_size]}
        return self._known.ranges(batch_size, workload, sizes)

    def _speeds(self, batch_size: int, workload: Workload) -> dict[int, float]:
        """Speeds of the numbers of drafts that were measured."""
        ranges = self._ranges(batch_size, workload)
        return {drafts: slow for drafts, (slow, fast) in ranges.items() if slow == fast}

    def _sizes_of(self, batch_size: int) -> list[int]:
        """Numbers of drafts to choose among at this batch size, ascending."""
        return sorted({0, *self._sizes, self.schedule[batch_size]})

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
        self._known.count()
        lookup = list(self.lookup)
        for key, octave in self._octaves.items():
            if octave.trial is not None:
                lookup[self._batch_sizes(1 << (key - 1))] = octave.trial.before
        return AdaptationState(
            parents=list(self._tree.parents),
            schedule=self.schedule,
            lookup=lookup,
            acceptance={name: fading.state() for name, fading in self._known.acceptance.items()},
            times=self._known.times.to_list(),
        )

    def restore(self, state: AdaptationState) -> bool:
        """Goes on from what an earlier engine learned; returns whether it had this tree. From
        another tree only acceptance is taken, as the prior."""
        for workload in WORKLOADS:
            known = state.acceptance[workload]
            prior = Acceptance.of(known.vector)
            self._known.acceptance[workload] = FadingAcceptance(
                self._tree, prior, known.vector_trees
            )
        if tuple(state.parents) != self._tree.parents:
            return False
        for workload in WORKLOADS:
            self._known.acceptance[workload].restore(state.acceptance[workload])
        self._known.times.restore(state.times)
        same_limits = state.schedule == self.schedule
        if same_limits and len(state.lookup) == len(self.lookup):
            self.lookup[:] = map(min, state.lookup, self._most)
        return True


def _wait(octave: Octave, drafts: int) -> int:
    """Steps from a lost trial of so many drafts to the next."""
    is_first = drafts == 0 and octave.plain_trials < 2
    return _SECOND_LOOK if is_first else octave.wait.get(drafts, _SHORTEST_WAIT)
