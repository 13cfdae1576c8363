"""Fits a model of step times to an engine's steps while it serves."""

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from math import exp, inf, log

import numpy as np
from numpy.typing import NDArray

_KEPT = 64  # steps of each kind; older ones are forgotten
FEWEST = 4  # steps of one kind before their time counts as known
# Steps from one fit of the prices to the next: as many as were seen, within these bounds.
_SOONEST_FIT, _LATEST_FIT = 24, 256
_ROUNDS = 6  # of reweighting: steps far from the fit count less each time
# Residuals beyond so many standard deviations weigh less (Huber).
_OUTLYING = 1.5
_LEAST_NOISE = 0.01
# Seconds of the shortest step: a step whose drafting was another's may seem to take none.
_SHORTEST = 1e-6
# Between fits, a step's difference from its expected time counts up to this share of it.
_CLIPPED = 0.06
# The machine's pace counts as changed beyond this logarithm: less may be noise.
_SAME_PACE = 0.02
# Steps that read prompts weigh less: a prompt token's price varies in small steps.
_MIXED, _MIXED_EVIDENCE = 8.0, 0.25
# How firmly each price is presumed to be 0. Where no step without drafts reads prompts, nothing
# tells what share of reading them is the draft's. It is small.
_PRESUMED = (1.0, 25.0, 1.0, 1.0, 1.0, 1.0, 1.0)

_Sample = tuple[int, int, int, float]  # batch size, prompt tokens, context tokens, seconds


@dataclass(eq=False)
class _Kind:
    """Steps with one number of drafts, in one octave of batch sizes."""

    drafts: int
    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=_KEPT))
    level: float | None = None  # seconds of a step without what the prices explain; None: not known
    evidence: float = 0.0  # steps that this engine took; those that read prompts count less
    batch_size: float = 0.0  # mean batch size
    least: float = inf  # a quarter of the fastest step's seconds
    after: "_Kind | None" = None
    """The kind of the steps that followed its latest ones; None: it is in use."""
    beside: tuple[_Sample, ...] = ()  # steps of `after` from then; empty: too few are known
    beside_level: float | None = None  # their level


class StepTimes:
    """Step times by number of drafts, of steps in which every decoding request has that many.

    A level for each number of drafts and octave of batch sizes, and prices that all steps share:
    see docs/internals.md, Adaptation. The steps of a kind that is not in use are old. So their time
    is scaled by how much longer the steps take now that followed them then.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}  # by drafts and octave
        self._in_use: dict[int, _Kind] = {}  # by octave
        self._prices = [0.0] * 7
        self._seen = self._fitted = 0

    def add(
        self, drafts: int, batch_size: int, seconds: float, prompts: int = 0, context: int = 0
    ) -> None:
        """Notes one step."""
        key = drafts, batch_size.bit_length()
        kind = self._kinds.get(key) or self._kinds.setdefault(key, _Kind(drafts))
        self._use(kind, key[1])
        seconds = max(seconds, _SHORTEST)
        kind.samples.append((batch_size, prompts, context, seconds))
        kind.evidence += 1.0 if prompts == 0 else _MIXED_EVIDENCE
        known = len(kind.samples)
        kind.batch_size += (batch_size - kind.batch_size) / known
        kind.least = min(kind.least, seconds / 4)
        self._seen += 1
        due = self._seen - self._fitted >= min(max(_SOONEST_FIT, self._fitted), _LATEST_FIT)
        if due or (kind.level is None and kind.evidence >= FEWEST):
            self._fit()
        elif kind.level is not None:
            priced = self._priced(kind.drafts, batch_size, context, float(prompts > 0))
            expected = kind.level + priced + prompts * self.prompt_price(kind.drafts)
            most = _CLIPPED * expected
            kind.level += min(max(seconds - expected, -most), most) / known

    def _use(self, kind: _Kind, octave: int) -> None:
        """Notes which kind is in use, and its steps beside those of the kind before it."""
        before = self._in_use.get(octave)
        if before is not None and before is not kind:
            before.after = kind
        self._in_use[octave], kind.after, kind.beside = kind, None, ()
        if len(kind.samples) == _KEPT:
            for other in self._kinds.values():
                if other.after is kind and not other.beside:
                    other.beside, other.beside_level = tuple(kind.samples), kind.level

    def forget(self, drafts: int, batch_size: int) -> None:
        """Drops the steps of this kind, so that they are measured anew."""
        self._kinds.pop((drafts, batch_size.bit_length()), None)

    def evidence(self, drafts: int, batch_size: int) -> float:
        """Steps of this kind that this engine took; those that read prompts count less."""
        kind = self._kinds.get((drafts, batch_size.bit_length()))
        return 0.0 if kind is None else kind.evidence

    def known(
        self, drafts: int, batch_size: int, context: float = 0.0, mixed: float = 0.0
    ) -> float | None:
        """Seconds of such a step (`add`) without its prompts, where this share of steps also reads
        prompts; None: not known."""
        kind = self._kinds.get((drafts, batch_size.bit_length()))
        if kind is None or kind.level is None:
            return None
        return self._seconds(kind, kind.level, batch_size, context, mixed)

    def bounds(
        self, drafts: int, batch_size: int, context: float = 0.0, mixed: float = 0.0
    ) -> tuple[float, float]:
        """Least and most seconds of such a step, given the times of other kinds that this engine
        measured: a pass over fewer tokens is not slower, and time grows no faster than tokens."""
        tokens, least, most = batch_size * (1 + drafts), 0.0, inf
        octave = batch_size.bit_length()
        for (number, of), kind in self._kinds.items():
            if kind.level is None or kind.evidence < FEWEST or (number, of) == (drafts, octave):
                continue
            seconds = self._seconds(kind, kind.level, kind.batch_size, context, mixed)
            ratio = tokens / (kind.batch_size * (1 + kind.drafts))
            if kind.drafts >= drafts:
                most = min(most, seconds * max(ratio, 1.0))
            if kind.drafts > drafts:  # an unknown share of its time was drafting
                ratio = (1 + drafts) / (1 + kind.drafts) * min(batch_size / kind.batch_size, 1.0)
            least = max(least, seconds * min(ratio, 1.0))
        return min(least, most), max(least, most)

    def likely(
        self, drafts: int, batch_size: int, context: float = 0.0, mixed: float = 0.0
    ) -> float:
        """Seconds of such a step on a line through the nearest kinds, within its `bounds`. Beyond
        the most drafts seen, the line is half as steep: there some rows cost nothing."""
        least, most = self.bounds(drafts, batch_size, context, mixed)
        seen = {
            number: self._seconds(kind, kind.level, batch_size, context, mixed)
            for (number, octave), kind in self._kinds.items()
            if octave == batch_size.bit_length() and number != drafts
            if kind.level is not None and kind.evidence >= FEWEST
        }
        fewer = sorted(number for number in seen if number < drafts)
        more = [number for number in seen if number > drafts]
        if not fewer or (len(fewer) == 1 and not more):
            return most if least == 0 or most == inf else (least * most) ** 0.5
        near = fewer[-1]
        other = min(more) if more else fewer[-2]
        slope = (seen[other] - seen[near]) / (other - near) * (1.0 if more else 0.5)
        return min(max(seen[near] + slope * (drafts - near), least), most)

    def prompt_price(self, drafts: int) -> float:
        """Seconds per prompt token; higher with trees, as the draft reads the prompt too."""
        return self._prices[0] + self._prices[1] * (drafts > 0)

    def _seconds(
        self, kind: _Kind, level: float, batch_size: float, context: float, mixed: float
    ) -> float:
        # Prices fitted to other batches must not push the time below a plausible one.
        seconds = max(level + self._priced(kind.drafts, batch_size, context, mixed), kind.least)
        return seconds * self._pace_since(kind, batch_size, context, mixed)

    def _pace_since(self, kind: _Kind, batch_size: float, context: float, mixed: float) -> float:
        """How much longer steps take now than when this kind was in use."""
        pace = 1.0
        while (after := kind.after) is not None:
            then, now = kind.beside_level, after.level
            if kind.beside and then is not None and now is not None:
                priced = self._priced(after.drafts, batch_size, context, mixed)
                pace *= max(now + priced, after.least) / max(then + priced, after.least)
            kind = after
        change = log(pace)
        return exp(change - min(max(change, -_SAME_PACE), _SAME_PACE))

    def _priced(self, drafts: int, batch_size: float, context: float, mixed: float) -> float:
        """Seconds that the prices explain, without prompts."""
        _, _, of_context, beside_trees, of_request, of_draft, beside_prompts = self._prices
        seconds = context * (of_context + beside_trees * (drafts > 0))
        return seconds + batch_size * (of_request + drafts * (of_draft + mixed * beside_prompts))

    def _fit(self) -> None:
        """Fits levels of all kinds of steps, and the prices, by reweighted least squares."""
        self._fitted = self._seen
        known = list(self._kinds.values())
        beside = [(kind, kind.after) for kind in known if kind.beside and kind.after in known]
        groups = [*known, *(after for _, after in beside if after)]
        taken = [*(kind.samples for kind in known), *(kind.beside for kind, _ in beside)]
        counts = [len(samples) for samples in taken]
        samples = np.array(list(chain.from_iterable(taken)))
        batch, prompts, context, seconds = samples.T
        kinds = np.repeat(np.arange(len(groups)), counts)
        drafts = np.repeat([float(kind.drafts) for kind in groups], counts)
        drafted = drafts > 0
        inputs = np.stack(
            [
                prompts, prompts * drafted, context, context * drafted, batch, batch * drafts,
                batch * drafts * (prompts > 0),
            ], axis=1,
        )  # fmt: skip
        scales = np.maximum(inputs.max(axis=0), 1.0)
        inputs = inputs / scales
        starts = np.cumsum([0, *counts[:-1]])
        means = np.add.reduceat(seconds, starts) / counts
        expected = np.maximum(means[kinds], seconds)
        usual = _median(expected)
        trust = np.ones(len(seconds))
        for _ in range(_ROUNDS):
            off = np.abs(seconds - expected) / expected
            noise = max(1.48 * _median(off), _LEAST_NOISE)
            weights = np.minimum(1.0, _OUTLYING * noise / np.maximum(off, 1e-9))
            weights *= trust / expected**2
            totals = np.add.reduceat(weights, starts)
            mean_seconds = np.add.reduceat(weights * seconds, starts) / totals
            mean_inputs = np.add.reduceat(weights[:, None] * inputs, starts) / totals[:, None]
            centred = inputs - mean_inputs[kinds]
            weighted = weights[:, None] * centred
            # Ridge: without evidence a price is 0; its effect is presumed below a usual step.
            ridge = (noise / usual) ** 2 * np.diag(_PRESUMED)
            prices = _not_negative(
                centred.T @ weighted + ridge, weighted.T @ (seconds - mean_seconds[kinds])
            )
            levels = mean_seconds - mean_inputs @ prices
            read = inputs[:, :2] @ prices[:2]
            expected = np.maximum(levels[kinds] + inputs @ prices, seconds / 4)
            trust = (1 + _MIXED * np.minimum(read / expected, 1)) ** -2
        self._prices = (prices / scales).tolist()
        for (kind, _), level in zip(beside, levels[len(known) :].tolist(), strict=True):
            kind.beside_level = level
        for kind, level in zip(known, levels.tolist(), strict=False):
            if kind.evidence >= FEWEST:
                kind.level = level
                kind.least = min(sample[3] for sample in kind.samples) / 4

    def to_list(self) -> list[tuple[int, int, float]]:
        """(drafts, batch size, seconds without prompts and context) of every known kind."""
        found = []
        for (drafts, _), kind in self._kinds.items():
            if kind.level is not None:
                batch_size = round(kind.batch_size)
                seconds = self._seconds(kind, kind.level, batch_size, 0.0, 0.0)
                found.append((drafts, batch_size, seconds))
        return found

    def restore(self, times: list[tuple[int, int, float]]) -> None:
        """Starts from an earlier engine's times; a few new steps outweigh them."""
        for drafts, batch_size, seconds in times:
            for _ in range(FEWEST):
                self.add(drafts, batch_size, seconds)
        for kind in self._kinds.values():
            kind.evidence = 0.0


def _median(values: NDArray[np.float64]) -> float:
    """The upper median: one of the values, found faster than by ``np.median``."""
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])


def _not_negative(
    products: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solves normal equations ``[n, n]``, ``[n]`` without negative prices: drops those below 0."""
    kept = np.arange(len(target))
    while len(kept):
        found = np.linalg.solve(products[np.ix_(kept, kept)], target[kept])
        if found.min() >= 0:
            prices = np.zeros(len(target))
            prices[kept] = found
            return prices
        kept = kept[found > 0]
    return np.zeros(len(target))
