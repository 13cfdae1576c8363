"""Estimates an engine's speed with each number of drafts from its past steps."""

from collections.abc import Iterable
from math import inf
from typing import get_args

from sequoia_vllm.adaptation.state import FadingAcceptance, Workload
from sequoia_vllm.adaptation.step_times import StepTimes
from sequoia_vllm.adaptation.trials import Step
from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.tree import TokenTree

WORKLOADS: tuple[Workload, ...] = get_args(Workload)

_COUNT_EVERY = 32  # steps: counting many trees takes as long as counting those of one step
# With fewer trees, expected tokens are noise.
_FEWEST_TREES = 16
# Accepted tokens that count as received before any was: a single end says little.
_RECEIVED = 16.0
# Weight of one step in shares of requests and of time, and in the mix that is served.
_SHARE_FADES, _MIX_FADES = 0.02, 0.01
_GAIN_HALF_LIFE = 5.0  # seconds: vLLM's log has a line every ten
_MOST_PROMPTS = 0.9  # cap on the share of the time that prompts are estimated to take


class Speeds:
    """Tokens per second of a request, from acceptance and step times. ``gain`` is the speed over
    plain decoding in the last seconds, for the same tokens and prompts; None: not known."""

    def __init__(self, tree: TokenTree) -> None:
        self.acceptance = {workload: FadingAcceptance(tree) for workload in WORKLOADS}
        self.times = StepTimes()
        self.gain: float | None = None
        self._tree = tree
        self._path_bytes = TreeCounts.path_bytes(tree)
        self._took = self._plain_took = 0.0  # recent seconds, and plain decoding's for the same
        # The same, and received tokens beyond one per request, of steps not counted yet.
        self._uncounted = self._plain_uncounted = 0.0
        self._gained = 0
        # Recent tokens that were accepted, and received: the others were behind a request's end.
        self._accepted = self._received = 0.0
        self._pending: dict[Workload, list[bytes]] = {workload: [] for workload in WORKLOADS}
        self._steps = 0
        self._with_trees = 1.0  # share of the requests that have trees where drafts are scheduled
        self._context = 0.0  # tokens of a request
        self._mixed = 0.0  # share of steps that read prompts
        self._prompts, self._seconds = 0.0, 1e-9  # a step's prompt tokens, and its time
        # By number of drafts, the share of a step's time that drafting takes, without prompts.
        self._drafting: dict[int, float] = {}

    def note(self, step: Step) -> int:
        """Takes a step; returns how many trees it verified."""
        trees = len(step.paths) // self._path_bytes
        self._steps += 1
        if step.paths:
            self._pending[step.workload].append(step.paths)
        if self._steps % _COUNT_EVERY == 0:
            self.count()
        moves = max(_MIX_FADES, 1 / self._steps)
        self._context += (step.context / step.batch_size - self._context) * moves
        if step.seconds is not None:
            self._prompts += (step.prompts - self._prompts) * moves
            self._mixed += ((step.prompts > 0) - self._mixed) * moves
            self._seconds += (step.seconds - self._seconds) * moves
            self._compare(step, step.seconds)
        self._gained += step.gained
        if step.drafts is None:
            return trees
        if step.drafts > 0:
            share = min(trees / step.batch_size, 1.0)
            self._with_trees += (share - self._with_trees) * _SHARE_FADES
        if step.seconds is not None:
            self.times.add(step.drafts, step.batch_size, step.seconds, step.prompts, step.context)
            if step.prompts == 0 and step.seconds > 0:
                share = step.drafting / step.seconds
                usual = self._drafting.get(step.drafts, share)
                self._drafting[step.drafts] = usual + (share - usual) * _SHARE_FADES
        return trees

    def _compare(self, step: Step, seconds: float) -> None:
        """Adds a step to the gain; a step without drafts counts as plain decoding."""
        drafts = step.drafts if step.grown is None else step.grown
        if drafts == 0 and not step.paths:
            self._uncounted += seconds
            self._plain_uncounted += seconds
        elif (plain := self.times.known(0, step.batch_size, step.context)) is not None:
            self._uncounted += seconds
            self._plain_uncounted += plain * step.gained / step.batch_size  # for each request
            self._plain_uncounted += plain + self._reading(step, drafts or 0, seconds, plain)

    def _reading(self, step: Step, drafts: int, seconds: float, plain: float) -> float:
        """Seconds that plain decoding would take for a step's prompts, beside decoding.

        The step's own time tells them better than prices do, less its drafting and what its trees
        cost the target. Requests that read prompts have no trees yet, but grow the first.
        """
        times = self.times
        level = times.known(drafts, step.batch_size, step.context) if drafts else None
        if step.prompts == 0 or level is None:
            return step.prompts * times.prompt_price(0)
        with_trees = len(step.paths) / self._path_bytes / step.batch_size
        scoring = max(level * (1 - self._drafting.get(drafts, 0.0)) - plain, 0.0) * with_trees
        return max(seconds - step.drafting - plain - scoring, 0.0)

    def count(self) -> None:
        """Counts the trees of the latest steps."""
        for workload, paths in self._pending.items():
            if paths:
                counts = TreeCounts.from_bytes(self._tree, b"".join(paths))
                kept = self.acceptance[workload].add(counts)
                self._accepted = kept * self._accepted + counts.tokens - counts.trees
                self._received *= kept
                paths.clear()
        self._received += self._gained
        kept = 0.5 ** (self._uncounted / _GAIN_HALF_LIFE)
        self._took = kept * self._took + self._uncounted
        self._plain_took = kept * self._plain_took + self._plain_uncounted
        self._uncounted = self._plain_uncounted = 0.0
        self._gained = 0
        if self._took > 0:
            self.gain = self._plain_took / self._took

    def fade(self, workload: Workload, trees: float) -> None:
        """Lowers the weight of counts to at most so many trees: they may be out of date."""
        self.count()
        kept = self.acceptance[workload].fade(trees)
        self._accepted, self._received = kept * self._accepted, kept * self._received

    def tokens(self, workload: Workload) -> list[float]:
        """Tokens that a request is expected to receive per step with 0, 1, 2, ... drafts."""
        expected = self.acceptance[workload].expected_tokens()
        received = (self._received + _RECEIVED) / (self._accepted + _RECEIVED)
        return (1 + self._with_trees * min(received, 1.0) * (expected - 1)).tolist()

    def ranges(
        self, batch_size: int, workload: Workload, sizes: Iterable[int]
    ) -> dict[int, tuple[float, float]]:
        """Lowest and highest speed by number of drafts; equal where it was measured. Fewer drafts
        never count as slower: they were disturbed. Empty while too few trees were verified."""
        if self.acceptance[workload].trees < _FEWEST_TREES:
            self.count()
        if self.acceptance[workload].trees < _FEWEST_TREES:
            return {}
        tokens, context = self.tokens(workload), self._context * batch_size
        ranges, shortest = {}, inf
        for drafts in sorted(sizes, reverse=True):
            seconds = self.times.known(drafts, batch_size, context, self._mixed)
            if seconds is None:
                least, most = self.times.bounds(drafts, batch_size, context, self._mixed)
            else:
                least = most = shortest = min(seconds, shortest)
            emitted = tokens[drafts] * self._left(drafts)
            ranges[drafts] = emitted / most, emitted / least if least > 0 else inf
        return ranges

    def fastest(self, drafts: int, batch_size: int, workload: Workload) -> float:
        """Highest speed that is possible, given steps with other numbers of drafts."""
        context = self._context * batch_size
        least, _ = self.times.bounds(drafts, batch_size, context, self._mixed)
        emitted = self.tokens(workload)[drafts] * self._left(drafts)
        return emitted / least if least > 0 else inf

    def likely(self, drafts: int, batch_size: int, workload: Workload) -> float:
        """Expected speed where such steps were not measured."""
        context = self._context * batch_size
        seconds = self.times.likely(drafts, batch_size, context, self._mixed)
        return self.tokens(workload)[drafts] * self._left(drafts) / seconds

    def _left(self, drafts: int) -> float:
        """Share of the time left after prompts; less with trees, as the draft reads them too."""
        arriving = self._prompts / self._seconds  # tokens a second
        return 1 - min(arriving * self.times.prompt_price(drafts), _MOST_PROMPTS)
