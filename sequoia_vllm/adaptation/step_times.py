"""How long an engine's steps take, by drafts and batch size, from the steps themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from statistics import median

_KEPT = 32  # steps of each kind; older ones are forgotten
FEWEST = 6
"""Steps of one kind before their time counts as known."""
# Batches whose size differs by less than this factor take as long per request.
_ALIKE = 1.3


class StepTimes:
    """Times of decoding steps in which every request was offered so many drafts.

    A step's time is the median of the latest ones of its kind: single steps are slow for
    reasons of their own.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, deque[float]]] = {}  # by drafts, by batch size

    def add(self, drafts: int, batch_size: int, seconds: float) -> None:
        """Notes one step."""
        cells = self._seconds.setdefault(drafts, {})
        cells.setdefault(batch_size, deque(maxlen=_KEPT)).append(seconds)

    def forget(self, drafts: int, batch_size: int) -> None:
        """Drops steps of batches like this, that are to be measured anew."""
        cells = self._seconds.get(drafts, {})
        for size in [size for size in cells if _alike(size, batch_size)]:
            del cells[size]

    def known(self, drafts: int, batch_size: int) -> float | None:
        """Seconds of such a step, from batches of nearly this size; None: not known."""
        cells = {
            size: seconds
            for size, seconds in self._seconds.get(drafts, {}).items()
            if _alike(size, batch_size)
        }
        if sum(map(len, cells.values())) < FEWEST:
            return None
        if len(cells.get(batch_size, ())) >= FEWEST:
            return median(cells[batch_size])
        # A step of a slightly larger batch is slightly slower, at most in proportion.
        return median(
            value * (batch_size / size) ** 0.5 for size, values in cells.items() for value in values
        )

    def known_growing(self, sizes: Iterable[int], batch_size: int) -> dict[int, float]:
        """Seconds of these numbers of drafts that are known: with fewer drafts never more.

        A pass over fewer tokens is not slower. Steps that seem so were disturbed, and what
        disturbs a step makes it longer: they take as long as those with more drafts.
        """
        growing = {}
        least = inf
        for drafts in sorted(sizes, reverse=True):
            seconds = self.known(drafts, batch_size)
            if seconds is not None:
                growing[drafts] = least = min(seconds, least)
        return growing

    def to_list(self) -> list[tuple[int, int, float]]:
        """(drafts, batch size, seconds) of all that is known."""
        return [
            (drafts, size, median(seconds))
            for drafts, cells in self._seconds.items()
            for size, seconds in cells.items()
            if len(seconds) >= FEWEST
        ]

    def restore(self, times: list[tuple[int, int, float]]) -> None:
        """Starts from what an earlier engine measured; a few new steps outweigh it."""
        for drafts, size, seconds in times:
            self._seconds.setdefault(drafts, {})[size] = deque([seconds] * FEWEST, maxlen=_KEPT)


def _alike(size: int, other: int) -> bool:
    return max(size, other) <= _ALIKE * min(size, other)
