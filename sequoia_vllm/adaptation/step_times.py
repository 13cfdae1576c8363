"""How long an engine's steps take, fitted to the steps themselves while it serves."""

from __future__ import annotations

from collections import deque
from itertools import chain

import numpy as np
from numpy.typing import NDArray

_KEPT = 64  # steps of each kind; older ones are forgotten
FEWEST = 6
"""Steps of one kind before their time counts as known."""
SETTLED, UNSETTLED = 64, -1
"""Steps without drafts after which the draft reads no more, and the number that those before get.

Some heads read on for a while. From then on such a step is as fast as plain decoding.
"""
_REFIT_EVERY = 24  # steps
_ROUNDS = 3  # of reweighting: steps far from the fit count less each time
# Residuals beyond so many standard deviations weigh less (Huber).
_OUTLYING = 1.5
_LEAST_NOISE = 0.01
# Steps that read prompts tell less of the rest: tokens are not equally dear in small steps.
_MIXED = 8.0

_Sample = tuple[int, int, int, float]  # batch size, prompt tokens, context tokens, seconds
_Cell = tuple[int, int]  # drafts, octave of the batch size


class StepTimes:
    """Times of steps in which every decoding request was offered so many drafts.

    The model of a step's seconds is a sum. One part depends on the number of drafts and on the
    octave of the batch size. The others are linear, with prices that all steps share: of tokens
    of prompts and of context (both higher where there are trees), of requests, and of drafts
    (higher beside prompts: a pass that computes much has no room left that costs nothing).
    Robust least squares fit all of it to the latest steps of each kind.
    """

    def __init__(self) -> None:
        self._cells: dict[_Cell, deque[_Sample]] = {}
        self._levels: dict[_Cell, float] = {}
        self._prices = np.zeros(7)
        self._unfitted = 0

    def add(
        self, drafts: int, batch_size: int, seconds: float, prompts: int = 0, context: int = 0
    ) -> None:
        """Notes one step.

        Args:
            drafts: Per request; or `UNSETTLED`.
            batch_size: Requests.
            seconds: Its time.
            prompts: Tokens of prompts that it read.
            context: Tokens of context of all its requests.
        """
        cell = drafts, batch_size.bit_length()
        if cell not in self._cells:
            self._cells[cell] = deque(maxlen=_KEPT)
        self._cells[cell].append((batch_size, prompts, context, seconds))
        self._unfitted += 1

    def forget(self, drafts: int, batch_size: int) -> None:
        """Drops steps of batches like this, that are to be measured anew."""
        for kind in (drafts, UNSETTLED) if drafts == 0 else (drafts,):
            self._cells.pop((kind, batch_size.bit_length()), None)
            self._levels.pop((kind, batch_size.bit_length()), None)

    def known(
        self, drafts: int, batch_size: int, context: float = 0.0, mixed: float = 0.0
    ) -> float | None:
        """Seconds of such a step but for prompts; None: not known.

        Args:
            drafts, batch_size, context: See `add`.
            mixed: Share of such steps that read prompts beside it.
        """
        octave = batch_size.bit_length()
        kinds = (drafts, UNSETTLED) if drafts == 0 else (drafts,)
        known = (c for kind in kinds if len(self._cells.get(c := (kind, octave), ())) >= FEWEST)
        cell = next(known, None)
        if cell is None:
            return None
        if self._unfitted >= _REFIT_EVERY or cell not in self._levels:
            self._fit()
        _, _, of_context, beside_trees, of_request, of_draft, beside_prompts = self._prices
        seconds = self._levels[cell] + context * (of_context + beside_trees * (drafts > 0))
        seconds += batch_size * (of_request + drafts * (of_draft + mixed * beside_prompts))
        # Prices that were fitted to other batches must not make it nothing.
        return max(float(seconds), min(self._cells[cell], key=lambda sample: sample[3])[3] / 4)

    def prompt_price(self, drafts: int) -> float:
        """Seconds that a prompt's token adds; where there are trees the draft reads it, too."""
        return float(self._prices[0] + self._prices[1] * (drafts > 0))

    def _fit(self) -> None:
        """Fits levels of all kinds of steps, and the prices, by reweighted least squares."""
        self._unfitted = 0
        cells = list(self._cells)
        counts = [len(self._cells[cell]) for cell in cells]
        samples = np.array(list(chain.from_iterable(self._cells.values())))
        batch, prompts, context, seconds = samples.T
        kinds = np.repeat(np.arange(len(cells)), counts)
        drafts = np.repeat([float(max(drafts, 0)) for drafts, _ in cells], counts)
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
            # Without evidence a price is 0: no more than a step's usual time may be its effect.
            ridge = (noise / usual) ** 2 * np.eye(len(scales))
            prices = _not_negative(
                centred.T @ weighted + ridge, weighted.T @ (seconds - mean_seconds[kinds])
            )
            levels = mean_seconds - mean_inputs @ prices
            read = inputs[:, :2] @ prices[:2]
            expected = np.maximum(levels[kinds] + inputs @ prices, seconds / 4)
            trust = (1 + _MIXED * np.minimum(read / expected, 1)) ** -2
        self._levels = dict(zip(cells, levels.tolist(), strict=True))
        self._prices = prices / scales

    def to_list(self) -> list[tuple[int, int, float]]:
        """(drafts, batch size, seconds without prompts and context) of all that is known."""
        found = []
        for (drafts, _), samples in self._cells.items():
            batch_size = sorted(sample[0] for sample in samples)[len(samples) // 2]
            seconds = self.known(drafts, batch_size)
            if seconds is not None and drafts != UNSETTLED:
                found.append((drafts, batch_size, seconds))
        return found

    def restore(self, times: list[tuple[int, int, float]]) -> None:
        """Starts from what an earlier engine measured; a few new steps outweigh it."""
        for drafts, batch_size, seconds in times:
            for _ in range(FEWEST):
                self.add(drafts, batch_size, seconds)


def _median(values: NDArray[np.float64]) -> float:
    """One of them: faster than numpy's median."""
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])


def _not_negative(
    products: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solution of normal equations ``[n, n]``, ``[n]`` by prices of which none is negative."""
    kept = np.arange(len(target))
    while len(kept):
        found = np.linalg.solve(products[np.ix_(kept, kept)], target[kept])
        if found.min() >= 0:
            prices = np.zeros(len(target))
            prices[kept] = found
            return prices
        kept = kept[found > 0]
    return np.zeros(len(target))
