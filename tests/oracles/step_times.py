"""Times of steps, learned with whole matrices: what `StepTimes` computes by parts of them."""

from math import exp, log, log1p, log2

import numpy as np

from sequoia_vllm.adaptation import step_times as its

CONTEXT, TREES_CONTEXT = "context", "context of trees"


class WholeFilter:
    """A Kalman filter of the logarithms by which a table of times is wrong.

    Each power of two of batch sizes, for each number of drafts, has such a correction; other batch
    sizes lie between two. Two more are for the logarithm of contexts, one of them only with drafts.

    Args:
        sizes: Numbers of drafts.
        table: Seconds ``[size, 1 + batches]``.
        doubt: A multiple of the deviations of differences between times.
    """

    def __init__(self, sizes: list[int], table: np.ndarray, doubt: float) -> None:
        self.sizes, self.table, self.doubt = sizes, table, doubt
        powers = 0
        while 2**powers < table.shape[1] - 1:
            powers += 1
        self.cells = [(drafts, power) for drafts in sizes for power in range(powers + 1)]
        self.names = [*self.cells, CONTEXT, TREES_CONTEXT]
        self.first = np.array([[self._covariance(a, b) for a in self.names] for b in self.names])
        self.spread, self.state = self.first.copy(), np.zeros(len(self.names))
        self.variance, self.pace = its._NOISE**2, 1.0
        self.seen = dict.fromkeys(sizes, 0)

    def _covariance(self, one, other) -> float:
        if CONTEXT in (one, other) or TREES_CONTEXT in (one, other):
            deviation = its._CONTEXTS if one == CONTEXT else its._TREES_CONTEXTS
            return deviation**2 if one == other else 0.0
        nodes = [log2(1 + drafts) for drafts, _ in (one, other)]
        rows = [log2((1 + drafts) * 2**power) for drafts, power in (one, other)]
        differs = its._DRAFTED**2 if one[0] > 0 and other[0] > 0 else 0.0
        differs += its._NODES**2 * nodes[0] * nodes[1] + its._ROWS**2 * rows[0] * rows[1]
        apart = abs(nodes[0] - nodes[1]) + abs(one[1] - other[1])
        differs += its._ALIKE**2 * exp(-apart / 2) + its._ALONE**2 * (one == other)
        return self.doubt**2 * differs + its._COMMON**2

    def weights(self, drafts: int, batch: int, context: float) -> np.ndarray:
        """How much each correction counts for such a step."""
        found = dict.fromkeys(self.names, 0.0)
        for power in range(len(self.cells) // len(self.sizes)):
            found[drafts, power] = max(0.0, 1 - abs(log2(batch) - power))
        found[CONTEXT] = log1p(context / its._CONTEXT)
        found[TREES_CONTEXT] = found[CONTEXT] if drafts else 0.0
        return np.array(list(found.values()))

    def seconds(self, drafts: int, batch: int, context: float = 0.0) -> float:
        """Seconds of such a step."""
        seconds = self.table[self.sizes.index(drafts), batch]
        return seconds * exp(self.weights(drafts, batch, context) @ self.state)

    def doubt_of(self, drafts: int, other: int, batch: int) -> float:
        """Deviation of the logarithm of two steps' ratio."""
        differ = self.weights(drafts, batch, 0) - self.weights(other, batch, 0)
        return max(differ @ self.spread @ differ, 0.0) ** 0.5

    def add(self, drafts: int, batch: int, seconds: float, context: int, noise: float) -> None:
        """Takes a step; one of a known machine has a noise of 1."""
        weights = self.weights(drafts, batch, context)
        its_noise = noise * self.variance
        variance = weights @ self.spread @ weights + its_noise
        seconds = max(seconds, its._SHORTEST)
        off = log(seconds / self.seconds(drafts, batch, context))
        most = its._OUTLYING * variance**0.5
        bounded = float(np.clip(off, -most, most))
        if noise == 1.0:
            if variance < 2 * its_noise:
                ratio = min(seconds / self.seconds(drafts, batch, context), exp(its._LONGEST))
                self.pace = (1 - its._PACE_FADES) * self.pace + its._PACE_FADES * ratio
            if self.seen[drafts] > 1:
                squared = np.clip(abs(bounded), its._LEAST_NOISE, its._MOST_NOISE) ** 2
                fades = its._NOISE_FADES
                self.variance = (1 - fades) * self.variance + fades * squared
            self.seen[drafts] += 1
        gain = self.spread @ weights / variance
        self.state += gain * bounded
        certain = 2 * (bounded / off if off else 1.0) - 1
        self.spread = self.spread - certain * np.outer(gain, gain) * variance
        # What is forgotten is what is known of differences: not of all times together.
        together = np.array([[a in self.cells and b in self.cells for a in self.names]
                             for b in self.names])  # fmt: skip
        first = self.first - its._COMMON**2 * together
        self.spread = (1 - its._FORGOTTEN) * self.spread + its._FORGOTTEN * first
        self.spread += its._DRIFT * self.variance * together
