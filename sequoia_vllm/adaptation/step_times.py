"""Predicts how long steps take by number of drafts and batch size, and learns from each step."""

from collections.abc import Callable, Sequence
from functools import partial
from math import exp, log, log1p

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.tree import TokenTree

Floats = NDArray[np.float64]
PassTime = Callable[[Floats], Floats]
Timed = tuple[int, int, float]
"""Drafts, batch size, and seconds of a step."""

KNEE_CPU = 10.0
"""Rows whose arithmetic takes as long as reading the weights, where a CPU is not measured."""
# Standard deviations of the table's error, in logarithms, where nothing is measured: of all times
# together, of all steps with drafts, for each doubling of rows and of nodes, of neighbours alike,
# and of each time alone.
_COMMON, _DRAFTED, _ROWS, _NODES, _ALIKE, _ALONE = 5.0, 0.15, 0.1, 0.1, 0.2, 0.05
_CONTEXTS, _TREES_CONTEXTS = 0.15, 0.05  # of the effect of contexts, and of theirs on trees
_CONTEXT = 8192.0  # tokens of all contexts from which they begin to count
_NOISE, _LEAST_NOISE, _MOST_NOISE = 0.05, 0.01, 0.3  # standard deviation of a step's logarithm
_OUTLYING = 2.0  # residuals count up to so many standard deviations: a step may wait for anything
_DRIFT = 0.01  # how much the machine's pace moves in a step, as a share of the noise's variance
_FORGOTTEN = 2e-5  # share of what is known of differences between steps that a step makes old
_NOISE_FADES = 0.03  # weight of one step in the noise's variance
_RESTORED = 16.0  # variance of an earlier engine's times, relative to one step's
_PACE_FADES, _LONGEST = 0.01, 1.4  # weight of one step in the pace, and its most (logarithm)
_SHORTEST = 1e-6  # seconds of a step: one whose drafting was another's may seem to take none


def pass_seconds(rows: Floats, knee: float) -> Floats:
    """Time of a forward pass over so many rows, relative to reading the weights.

    ``knee``: rows whose arithmetic takes as long.
    """
    result: Floats = (1 + (rows / knee) ** 3) ** (1 / 3)
    return result


def step_seconds(
    tree: TokenTree, batches: int, sizes: Sequence[int], target: PassTime, draft: PassTime
) -> Floats:
    """Step times by those of passes: the target's over all nodes, the draft's over each level.

    Args:
        batches: The largest batch size.
        sizes: Numbers of drafts.
        target, draft: Seconds of a pass over so many rows.

    Returns:
        Float64 ``[len(sizes), 1 + batches]``, by batch size from 0 (not used) on.
    """
    drafts, batch = np.array(sizes, dtype=np.float64)[:, None], np.arange(batches + 1.0)
    depths = np.maximum.accumulate(tree.depths)[list(sizes)][:, None].astype(np.float64)
    widths = batch * drafts / np.maximum(depths, 1)
    return target(batch * (1 + drafts)) + depths * draft(widths)


def assumed_seconds(
    tree: TokenTree, batches: int, sizes: Sequence[int], knee: float = KNEE_CPU, draft: float = 0.05
) -> Floats:
    """`step_seconds` where nothing is known of the machine, relative to reading the weights.

    Args:
        batches: The largest batch size.
        sizes: Numbers of drafts.
        knee: See `pass_seconds`.
        draft: Time of the draft's pass, relative to the target's.

    Returns:
        Float64 ``[len(sizes), 1 + batches]``, by batch size from 0 (not used) on.
    """
    target = partial(pass_seconds, knee=knee)
    return step_seconds(tree, batches, sizes, target, lambda rows: draft * target(rows))


class StepTimes:
    """A table of step times, times a correction for each number of drafts and octave of batches.

    The corrections' logarithms are Gaussian, and alike for like steps. So each step corrects all
    times a little, its own most (a Kalman filter). The rest is the machine's pace, which all share
    and which drifts, and the effect of contexts.

    Attributes:
        sizes: Numbers of drafts, ascending, 0 first. All ``[size]`` below are in this order.
        seen: Float64 ``[size]``: steps of each number of drafts that this engine took.
        pace: Mean of recent steps' seconds over what was expected; disturbed ones are longer.
    """

    def __init__(self, sizes: Sequence[int], seconds: Floats, doubt: float = 1.0) -> None:
        """Starts from seconds ``[size, 1 + batches]``. ``doubt``: how wrong their ratios may be, as
        a multiple of what is assumed where nothing is measured."""
        self.sizes = list(sizes)
        self.seen = np.zeros(len(sizes))
        self._place = {drafts: place for place, drafts in enumerate(sizes)}
        self._table = np.log(seconds)
        batch = np.maximum(np.arange(seconds.shape[1]), 1)
        self._octaves = int(batch[-1] - 1).bit_length() + 1
        # Corrections of a batch size lie between those of the powers of two around it.
        nodes, at = np.arange(self._octaves)[:, None], np.log2(batch)
        self._between = np.maximum(1 - np.abs(at - nodes), 0.0)
        self._batch = batch
        self._drafted = (np.array(sizes) > 0)[:, None]
        self._prior = _prior(self.sizes, self._octaves, doubt)
        self._spread = self._prior.copy()  # covariance
        self._state = np.zeros(len(self._prior))
        self._variance = _NOISE**2
        self.pace = 1.0
        self._served = np.zeros((len(sizes), self._octaves))  # steps, to be saved

    def add(
        self, drafts: int, batch_size: int, seconds: float, context: int = 0, noise: float = 1.0
    ) -> None:
        """Corrects the times by one step without prompts; ``noise``: of its variance."""
        place = self._place.get(drafts)
        if place is None:
            return
        entries, weights = self._row(place, batch_size, context)
        known = self._spread[:, entries] @ weights
        variance = noise * self._variance
        expected = float(known[entries] @ weights) + variance
        off = log(max(seconds, _SHORTEST)) - self._table[place, batch_size]
        off -= float(self._state[entries] @ weights)
        bound = _OUTLYING * expected**0.5
        taken = min(max(off, -bound), bound)
        if noise == 1.0:
            surprise = min(max(taken * taken, _LEAST_NOISE**2), _MOST_NOISE**2)
            if self.seen[place] >= 2:
                self._variance += _NOISE_FADES * (surprise - self._variance)
            if expected < 2 * variance:  # the time was known
                self.pace += _PACE_FADES * (exp(min(off, _LONGEST)) - self.pace)
            self.seen[place] += 1
            self._served[place, batch_size.bit_length() - 1] += 1
        self._state += known * (taken / expected)
        # What lies far off tells little, and casts doubt on what is known: the next step decides.
        learned = 2 * taken / off - 1 if off else 1.0
        self._spread -= np.outer(known * (learned / expected), known)
        cells = len(self.sizes) * self._octaves
        self._spread += _FORGOTTEN * (self._prior - self._spread)
        self._spread[:cells, :cells] += _DRIFT * self._variance - _FORGOTTEN * _COMMON**2

    def _row(self, place: int, batch_size: int, context: float) -> tuple[list[int], Floats]:
        """The entries of the state that a step's time depends on, and how much."""
        low = batch_size.bit_length() - 1
        high = min(low + 1, self._octaves - 1)
        share = self._between[low, batch_size]
        cell, last = place * self._octaves, len(self._state) - 1
        length = log1p(context / _CONTEXT)
        weights = np.array([share, 1 - share, length, length * (place > 0)])
        return [cell + low, cell + high, last - 1, last], weights

    def seconds(self, drafts: int, batch_size: int, context: float = 0.0) -> float:
        """Seconds of one step without prompts; of the nearest number of drafts."""
        place = self._place.get(drafts)
        if place is None:
            place = int(np.searchsorted(self.sizes, drafts).clip(0, len(self.sizes) - 1))
        cells, weights = self._row(place, batch_size, context)
        return exp(self._table[place, batch_size] + float(self._state[cells] @ weights))

    def all_seconds(self, batches: slice, context: float = 0.0) -> Floats:
        """Seconds ``[size, batch]`` of steps without prompts, each request with such a context."""
        cells = self._state[:-2].reshape(len(self.sizes), self._octaves)
        lengths = np.log1p(context * self._batch[batches] / _CONTEXT)
        contexts = lengths * (self._state[-2] + self._drafted * self._state[-1])
        result: Floats = np.exp(
            self._table[:, batches] + cells @ self._between[:, batches] + contexts
        )
        return result

    def doubts(self, drafts: int, batch_size: int) -> Floats:
        """Standard deviations ``[size]`` of the times' logarithms, relative to this number's."""
        low = batch_size.bit_length() - 1
        high, share = min(low + 1, self._octaves - 1), self._between[low, batch_size]
        count = len(self.sizes)
        cells = np.arange(count) * self._octaves
        both = np.concatenate([cells + low, cells + high])
        part = self._spread[np.ix_(both, both)].reshape(2, count, 2, count)
        weights = np.array([share, 1 - share])
        mixed = np.einsum("i,iajb,j->ab", weights, part, weights)
        place = self._place[drafts]
        variances = mixed.diagonal() - 2 * mixed[place] + mixed[place, place]
        result: Floats = np.sqrt(np.maximum(variances, 0.0))
        return result

    def measured(self, timed: Sequence[Timed], doubt: float) -> "StepTimes":
        """Starts from these times of steps, and doubts them so much.

        A batch takes as long as the next larger one. Beyond the last, and for numbers without any,
        ratios are the table's.
        """
        table, batches = np.exp(self._table), np.arange(len(self._batch))
        table *= np.mean(
            [took / table[self._place[n], b] for n, b, took in timed if n in self._place]
        )
        for place, drafts in enumerate(self.sizes):
            known = sorted((batch, took) for number, batch, took in timed if number == drafts)
            if known:
                sizes, seconds = np.array(known).T
                at, last = np.searchsorted(sizes, batches), int(sizes[-1])
                table[place] *= seconds[-1] / table[place, last]
                table[place, : last + 1] = seconds[at[: last + 1]]
        return StepTimes(self.sizes, table, doubt)

    def to_list(self) -> list[Timed]:
        """Times without contexts of the kinds of steps that were seen."""
        return [
            (self.sizes[place], 1 << octave, self.seconds(self.sizes[place], 1 << octave))
            for place, octave in np.argwhere(self._served > 0).tolist()
        ]

    def restore(self, times: list[Timed]) -> None:
        """Starts from an earlier engine's times; a few new steps outweigh them."""
        for drafts, batch_size, seconds in times:
            if 1 <= batch_size < len(self._batch):
                self.add(drafts, batch_size, seconds, noise=_RESTORED)


def _prior(sizes: Sequence[int], octaves: int, doubt: float) -> Floats:
    """Covariance of the corrections, ``[size * octave + 2]`` twice; the last two are contexts'."""
    drafts, octave = np.repeat(sizes, octaves), np.tile(np.arange(octaves), len(sizes))
    nodes = np.log2(1 + drafts)
    rows, drafted = nodes + octave, (drafts > 0).astype(np.float64)
    apart = np.abs(np.subtract.outer(nodes, nodes)) + np.abs(np.subtract.outer(octave, octave))
    differences = _ALIKE**2 * np.exp(-apart / 2) + _ALONE**2 * np.eye(len(drafts))
    for deviation, values in ((_DRAFTED, drafted), (_ROWS, rows), (_NODES, nodes)):
        differences += deviation**2 * np.outer(values, values)
    found = np.zeros((len(drafts) + 2,) * 2)
    found[:-2, :-2] = doubt**2 * differences + _COMMON**2
    found[-2:, -2:] = np.diag([_CONTEXTS**2, _TREES_CONTEXTS**2])
    return found
