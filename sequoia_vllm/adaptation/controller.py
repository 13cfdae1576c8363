"""Decides how much of the tree an engine drafts, from what it measures while it serves."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import get_args

import numpy as np

from sequoia_vllm.adaptation.prompt_steps import Gain, PromptSteps
from sequoia_vllm.adaptation.state import AdaptationState, FadingAcceptance, Workload
from sequoia_vllm.adaptation.step import Step
from sequoia_vllm.adaptation.step_times import Floats, StepTimes, Timed, assumed_seconds
from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.tree import Acceptance, TokenTree

logger = logging.getLogger("vllm.sequoia.adaptation")  # shown by vLLM's own handler

WORKLOADS: tuple[Workload, ...] = get_args(Workload)

# A number of drafts is left for one that is more than this faster, and drafting must gain as much.
GAIN = 0.01
# Times that are not certain count as shorter by so many standard deviations. So what may be faster
# is measured: a few steps make it certain. Smaller deviations are certain. Tokens of drafted trees
# count as more, likewise: else an unlucky dozen of trees ends drafting, and few are seen after it.
_HOPE, _CERTAIN, _COUNTED = 1.5, 0.03, 0.015
# Steps from one decision to the next, at first and later. Every so many are for all batch sizes.
_AT_FIRST, _LATER, _FIRST_STEPS, _OTHERS = 4, 8, 64, 8
_SHARE_FADES = 0.02  # weight of one step in shares of requests and of time
_CONTEXT_FADES = 0.01
# Accepted tokens that count as received before any was: a single end says little.
_RECEIVED = 16.0
_DOUBT_MEASURED = 0.3  # of times that are measured at start, see `StepTimes`
# Share of the time that probes may lose.
_MOST_LOST = 0.005
# Steps from one probe to the next while nothing is drafted; and until plain steps are first timed.
_SOONEST_PROBE, _LATEST_PROBE, _FIRST_PLAIN = 32, 128, 48
# Trees of a probe at least, at most while they are promising, and its steps at most.
_TREES, _MOST_TREES, _MOST_STEPS = 3, 24, 32
_PROMISING = 0.95  # speed relative to plain decoding
_OLD_TREES = 6.0  # weight of earlier trees in a probe
_PLAIN_STEPS = 3  # of a probe without drafts
_PLAIN_KNOWN = 0.03  # relative standard deviation of plain steps' time that needs no probe
# Steps after preemptions until trees may shrink again, and until they may grow.
_BETWEEN_SHRINKING, _CALM, _NOT_THE_CAUSE = 16, 1000, 6400
_SAY_EVERY, _SETTLED = 60.0, 32  # seconds between log lines; steps from a decision to its line


@dataclass
class _Probe:
    """A few steps with other drafts than decided: some where there are none, or none."""

    drafts: int
    steps: int = 0
    trees: int = 0
    seen: int = 0  # steps whose time counts


class DraftController:
    """Follows an engine's steps, and keeps its table of drafts by batch size (docs/internals.md,
    Adaptation). Speculation that does not pay is off within 50 steps.

    Candidates are numbers of drafts. Each has a row of times and expected tokens.

    Args:
        tree: The engine's tree.
        schedule: Configured drafts at batch sizes 0 (not used), 1, 2, ...; kept as they are.
        most: The most drafts at these batch sizes.
        sizes: Numbers of drafts to choose among, besides 0 and the schedule's, up to ``most``.
        times: Seconds ``[size, 1 + batches]`` of steps with these numbers of drafts, by batch size;
            None: `assumed_seconds` of a small device.
        doubt: How wrong the times' ratios may be, see `StepTimes`.
        host_bound: Whether steps that read prompts wait for the host, see `PromptSteps`.

    Attributes:
        lookup: Drafts at batch sizes 0, 1, 2, ...; changed in place.
        decisions: How often what is drafted at the present batch size changed, or was computed anew
            from measured times; probes are not counted.
        speedup: Speed relative to plain decoding in the last seconds, see `Gain`; None: not known.
    """

    def __init__(
        self,
        tree: TokenTree,
        schedule: Sequence[int],
        most: Sequence[int],
        sizes: Sequence[int],
        times: Callable[[list[int]], Floats] | None = None,
        doubt: float = 1.0,
        host_bound: bool = False,
    ) -> None:
        self.decisions = 0
        self.schedule, self.lookup = list(schedule), list(schedule)
        self.speedup: float | None = None
        self._tree, self._path_bytes = tree, TreeCounts.path_bytes(tree)
        self._most, self._whole = list(most), list(most)  # the former is less after preemptions
        self._sizes = np.array(sorted({0, *sizes, *schedule} & set(range(tree.size))))
        if times is None:
            times = partial(assumed_seconds, tree, len(schedule) - 1)
        self._times = StepTimes(self._sizes.tolist(), times(self._sizes.tolist()), doubt)
        self._octaves = np.log2(np.maximum(np.arange(len(schedule)), 1)).astype(np.int64)
        self._prompts = PromptSteps(int(self._octaves[-1]) + 1, host_bound)
        self._gain = Gain()
        is_offered = np.isin(self._sizes, [0, *sizes])[:, None]
        self._offered = is_offered | (self._sizes[:, None] == np.array(schedule))
        self._acceptance = {workload: FadingAcceptance(tree) for workload in WORKLOADS}
        self._pending: dict[Workload, list[bytes]] = {workload: [] for workload in WORKLOADS}
        # Recent tokens that were accepted, and received: the others were behind a request's end.
        self._accepted = self._received = _RECEIVED
        self._with_trees = 1.0  # share of the requests that have trees where drafts are scheduled
        self._context = 0.0  # tokens of a request
        self._drafting: dict[int, float] = {}  # by number of drafts, drafting's share of a step
        self._steps = self._shrunk = self._decided_at = self._changed_at = 0
        self._workload: Workload = "greedy"
        self._octave = self._others_at = 0
        self._chosen = np.zeros(len(schedule), dtype=np.int64)  # places in `_sizes`
        self._probe: _Probe | None = None
        self._idle, self._wait = 0, _SOONEST_PROBE  # steps without drafts; from probe to probe
        self._spare = 0.0  # seconds that probes may still lose
        self._restored: list[Timed] = []  # times of an earlier engine
        self._said: dict[int, int] = {}  # by octave, the drafts that were logged last
        self._said_at = -inf
        self._choose(slice(1, None))
        self._publish()

    def observe(self, step: Step) -> None:
        """Takes one step; changes `lookup` where other drafts are faster."""
        trees = self._note(step)
        self._steps += 1
        self._follow_preemptions(step)
        octave = step.batch_size.bit_length()
        is_new = step.workload != self._workload or octave != self._octave
        self._workload, self._octave = step.workload, octave
        decided = self.decided(step.batch_size)
        every = _AT_FIRST if self._steps < _FIRST_STEPS or self._probe else _LATER
        if is_new or self._steps - self._decided_at >= every:
            self._decide(step, is_new)
        if self._probe is not None:
            self._go_on(self._probe, step, trees)
        else:
            self._maybe_probe(step)
        self._publish()
        if self.decided(step.batch_size) != decided:
            self.decisions += 1
            self._changed_at = self._steps
        if self._steps - self._changed_at >= _SETTLED and self._steps % _LATER == 0:
            self._say(step)

    def take_times(self, timed: Sequence[Timed]) -> None:
        """Starts anew from times of steps that were measured before the engine served."""
        self._times = self._times.measured(timed, _DOUBT_MEASURED)
        self._times.restore(self._restored)
        self.decisions += 1
        self._chosen[:] = 0
        self._choose(slice(1, None))
        self._publish()

    def decided(self, batch_size: int) -> int:
        """Drafts at this batch size, probes left out."""
        return int(self._sizes[self._chosen[batch_size]])

    # -- what steps say ----------------------------------------------------------------------

    def _note(self, step: Step) -> int:
        """Learns from a step; returns how many trees it verified."""
        trees = len(step.paths) // self._path_bytes
        if step.paths:
            self._pending[step.workload].append(step.paths)
        self._received += step.gained
        moves = max(_CONTEXT_FADES, 1 / (1 + self._steps))
        self._context += (step.context / step.batch_size - self._context) * moves
        scored, steady = step.scored, step.scored == step.drafts
        if scored > 0 and steady and (trees or step.prompts):
            share = min(trees / step.batch_size, 1.0)
            self._with_trees += (share - self._with_trees) * _SHARE_FADES
        if step.seconds is None:
            return trees
        drafting = self._drafting.get(scored, 0.0)
        # Where drafts were to be scored and none was, the draft may still read what it missed.
        if step.prompts == 0 and not step.is_told and (trees or scored == 0):
            seconds: float | None = step.seconds
            if not steady:  # it grew another number than it scored
                is_timed = step.drafting > 0 or step.drafts == 0
                is_known = is_timed and (scored == 0 or scored in self._drafting)
                seconds = (step.seconds - step.drafting) / (1 - drafting) if is_known else None
            elif step.seconds > 0 and scored > 0:
                share = min(step.drafting / step.seconds, 0.9)
                drafting = self._drafting.get(scored, share)
                self._drafting[scored] = drafting + (share - drafting) * _SHARE_FADES
            if seconds is not None:
                self._times.add(scored, step.batch_size, seconds, step.context)
        without = self._times.seconds(scored, step.batch_size, step.context)
        if not step.is_told:
            self._prompts.add(step, step.seconds, without, drafting)
        self._gain.add(step, step.seconds, trees, self._times, drafting)
        self.speedup = self._gain.value
        return trees

    def _count(self) -> None:
        """Counts the trees of the latest steps."""
        for workload, paths in self._pending.items():
            if paths:
                counts = TreeCounts.from_bytes(self._tree, b"".join(paths))
                kept = self._acceptance[workload].add(counts)
                self._fade_received(kept)
                self._accepted += counts.tokens - counts.trees
                paths.clear()

    def _fade_received(self, kept: float) -> None:
        self._accepted, self._received = kept * self._accepted, kept * self._received

    # -- decisions ---------------------------------------------------------------------------

    def _decide(self, step: Step, is_new: bool) -> None:
        """Chooses for the batch sizes of this octave, and now and then for the others."""
        self._count()
        self._decided_at = self._steps
        first = 1 << (self._octave - 1)
        self._others_at -= 1
        if is_new or self._others_at <= 0:
            self._others_at = _OTHERS
            self._choose(slice(1, None))
        self._choose(slice(first, 2 * first), step.batch_size)

    def _choose(self, batches: slice, present: int | None = None) -> None:
        """Takes what gives most tokens a second, with hope (`_HOPE`): at the ``present`` size for
        times, and at all for drafting itself.

        Where nothing is drafted there is no hope: to begin may cost more than a step.
        """
        worth = -np.log(self._seconds_per_token(batches))
        chosen = self._chosen[batches]
        worth[0] += GAIN - _HOPE * self._chance() * (chosen > 0)
        if present is not None and self._times.seen.any() and self.decided(present) > 0:
            doubts = self._times.doubts(self.decided(present), present)
            worth += _HOPE * np.maximum(doubts - _CERTAIN, 0.0)[:, None]
        allowed = self._sizes[:, None] <= np.array(self._most[batches])
        worth[~(allowed & self._offered[:, batches])] = -inf
        best, columns = worth.argmax(axis=0), np.arange(worth.shape[1])
        is_better = worth[best, columns] > worth[chosen, columns] + GAIN
        self._chosen[batches] = np.where(is_better, best, chosen)

    def _seconds_per_token(self, batches: slice) -> Floats:
        """Expected seconds per token of a request, ``[size, batch]``."""
        seconds = self._times.all_seconds(batches, self._context)
        # Fewer drafts take no longer: such steps were disturbed.
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        tokens, octaves = self._tokens(), self._octaves[batches]
        prompts = self._prompts.per_token(seconds, tokens, self._sizes, octaves)
        return seconds / tokens[:, None] + prompts

    def _tokens(self) -> Floats:
        """Tokens that a request is expected to receive per step, ``[size]``."""
        expected = self._acceptance[self._workload].expected_tokens()[self._sizes]
        result: Floats = 1 + self._share() * (expected - 1)
        return result

    def _share(self) -> float:
        """Share of the accepted tokens of a tree for each request that users receive."""
        return self._with_trees * min(self._received / max(self._accepted, 1e-9), 1.0)

    def _chance(self) -> float:
        """How wrong the tokens of steps with drafts may be: a deviation of their logarithm."""
        doubt = self._share() * self._acceptance[self._workload].doubt() / self._tokens()[-1]
        return max(float(doubt) - _COUNTED, 0.0)

    def _publish(self) -> None:
        """Writes what is to be drafted."""
        drafts = self._sizes[self._chosen]
        if (probe := self._probe) is not None:
            drafts = np.where(drafts == 0, np.minimum(probe.drafts, self._most), drafts)
            if probe.drafts == 0:
                drafts = np.zeros_like(drafts)
        self.lookup[1:] = drafts[1:].tolist()

    def _follow_preemptions(self, step: Step) -> None:
        """Goes to the next smaller size for a while after requests were preempted, until some are
        without drafts: then drafts are not the cause."""
        since, drafts = self._steps - self._shrunk, self.lookup[step.batch_size]
        is_less = self._most != self._whole
        if is_less and since > _CALM:
            self._most[:] = self._whole
        elif step.preempted and since > _BETWEEN_SHRINKING and drafts > 0:
            self._shrunk, self._probe = self._steps, None
            smaller = int(self._sizes[self._sizes < drafts].max())
            first = step.batch_size
            self._most[first:] = [min(most, smaller) for most in self._most[first:]]
            self._choose(slice(1, None))
        elif step.preempted and since > _BETWEEN_SHRINKING and is_less:
            self._most[:], self._shrunk = self._whole, self._steps + _NOT_THE_CAUSE

    # -- probes ------------------------------------------------------------------------------

    def _maybe_probe(self, step: Step) -> None:
        """Begins a probe where nothing is drafted, or where plain steps' time is not known."""
        decided, batch_size = self.decided(step.batch_size), step.batch_size
        self._spare += _MOST_LOST * (step.seconds or 0.0)
        if decided > 0:
            self._idle, self._wait = 0, _SOONEST_PROBE
            if self._spare < 0 or self._steps % _FIRST_PLAIN:
                return
            if self._times.doubts(decided, batch_size)[0] > _PLAIN_KNOWN:
                self._probe = _Probe(0)
            return
        self._idle += 1
        offered = self._sizes[self._offered[:, batch_size]]
        sizes = offered[(offered > 0) & (offered <= self._most[batch_size])]
        if self._idle >= self._wait and self._spare >= 0 and len(sizes):
            self._count()
            self._fade_received(self._acceptance[step.workload].fade(_OLD_TREES))
            self._probe = _Probe(int(sizes[0]))
            self._idle, self._wait = 0, min(2 * self._wait, _LATEST_PROBE)

    def _go_on(self, probe: _Probe, step: Step, trees: int) -> None:
        """Counts a step of a probe, and ends it when it has shown enough."""
        probe.steps += 1
        probe.trees += trees
        probe.seen += step.scored == step.drafts == probe.drafts
        decided, batch_size = self.decided(step.batch_size), step.batch_size
        if step.seconds is not None and step.prompts == 0 and not step.is_told:
            # What the decided number of drafts would have taken for the same tokens.
            usual = self._times.seconds(decided, batch_size, step.context)
            tokens = self._tokens()[self._chosen[batch_size]]
            self._spare -= step.seconds - usual * (1 + step.gained / batch_size) / tokens
        is_over = probe.steps >= _MOST_STEPS
        if probe.drafts == 0:
            is_over |= probe.seen >= _PLAIN_STEPS or decided == 0
        else:
            is_over |= decided > 0 or probe.trees >= _MOST_TREES
            is_over |= probe.trees >= _TREES and not self._is_promising(batch_size)
        if is_over:
            self._probe = None

    def _is_promising(self, batch_size: int) -> bool:
        """Whether some drafts would be about as fast as none."""
        self._count()
        [seconds] = self._seconds_per_token(slice(batch_size, batch_size + 1)).T
        allowed = self._offered[:, batch_size] & (self._sizes <= self._most[batch_size])
        return bool(seconds[0] / seconds[allowed][1:].min() > _PROMISING)

    def _say(self, step: Step) -> None:
        """Logs the present number of drafts if it changed, at most once in `_SAY_EVERY`."""
        now, drafts = time.monotonic(), self.decided(step.batch_size)
        is_news = self._said.get(self._octave, self.schedule[step.batch_size]) != drafts
        if not is_news or now - self._said_at < _SAY_EVERY or self._times.seen[0] == 0:
            return
        self._said[self._octave], self._said_at = drafts, now
        speeds = step.batch_size / self._seconds_per_token(
            slice(step.batch_size, step.batch_size + 1)
        )
        seen = np.flatnonzero(self._times.seen[1:]) + 1
        best = self._chosen[step.batch_size] or (seen[speeds[seen, 0].argmax()] if len(seen) else 1)
        logger.info(
            "Sequoia: %s at batch %d (plain %.0f tokens/s, with drafts %.0f)",
            f"{drafts} draft{'s' * (drafts > 1)}" if drafts > 0 else "speculation off",
            step.batch_size, speeds[0, 0], speeds[best, 0],
        )  # fmt: skip

    # -- across restarts -----------------------------------------------------------------------

    def state(self) -> AdaptationState:
        """What was learned."""
        self._count()
        return AdaptationState(
            parents=list(self._tree.parents),
            schedule=self.schedule,
            lookup=[0, *self._sizes[self._chosen[1:]].tolist()],
            acceptance={name: fading.state() for name, fading in self._acceptance.items()},
            times=self._times.to_list(),
        )

    def restore(self, state: AdaptationState) -> bool:
        """Goes on from what an earlier engine learned; returns whether it had this tree. From
        another tree only acceptance is taken, as the prior."""
        is_same = tuple(state.parents) == self._tree.parents
        for workload in WORKLOADS:
            known = state.acceptance[workload]
            prior = Acceptance.of(known.vector)
            fading = FadingAcceptance(self._tree, prior, known.vector_trees)
            if is_same:
                fading.restore(known)
            self._acceptance[workload] = fading
        if is_same:
            self._restored = state.times
            self._times.restore(self._restored)
        self._workload = max(WORKLOADS, key=lambda name: state.acceptance[name].trees)
        self._wait = _LATEST_PROBE
        self._choose(slice(1, None))
        self._publish()
        return is_same
