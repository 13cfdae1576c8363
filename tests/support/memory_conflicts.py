"""Bytes that one program of a launch writes and another one writes or reads.

Programs of a launch run in no order and nothing makes one wait for another. So what
two of them write is one value or the other, and what one reads of another is old or
new. The interpreter runs them one after the other, and every result looks right.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from tests.support.memory_regions import Region, Storage

# In place of a program: written by atomic operations, which several may do.
_ATOMIC = -1


@dataclass(frozen=True)
class Conflict:
    """Programs are numbered from 0 in the grid's order; -1 is what atomics wrote."""

    kind: str  # "write" or "read"
    region: Region
    address: int
    program: int
    writer: int


class _Written:
    """The last writer of each cell of a storage; cells are as wide as its accesses."""

    def __init__(self, storage: Storage, width: int) -> None:
        self.first = storage.first
        self.cell = gcd(width, storage.size)
        # Zeros cost no memory until they are written.
        self.writers = np.zeros(storage.size // self.cell, dtype=np.int32)

    def cells(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """``[accesses, cells of each]``; makes cells narrower where that is needed."""
        offsets = addresses - self.first
        fitting = gcd(self.cell, width, int(np.gcd.reduce(offsets)))
        if fitting != self.cell:
            self.writers = np.repeat(self.writers, self.cell // fitting)
            self.cell = fitting
        return (offsets // self.cell)[:, None] + np.arange(width // self.cell)


@dataclass
class _SingleReads:
    region: Region
    places: set[tuple[int, int]] = field(default_factory=set)


class LaunchConflicts:
    """Takes the accesses of one launch; all must lie in their region's storage."""

    def __init__(self) -> None:
        self._written: dict[Storage, _Written] = {}
        self._reads: list[tuple[Region, np.ndarray, int, int]] = []
        # Of single numbers: addresses and programs by region and width.
        self._single_reads: dict[tuple[int, int], _SingleReads] = {}

    def write(
        self, region: Region, addresses: np.ndarray, width: int, program: int, atomic: bool = False
    ) -> Conflict | None:
        """Stores of ``width`` bytes at int64 addresses; the first that another program wrote."""
        assert region.storage is not None
        written = self._written.get(region.storage)
        if written is None:
            written = self._written[region.storage] = _Written(region.storage, width)
        cells = written.cells(addresses, width)
        before = written.writers[cells]
        mark = _ATOMIC if atomic else program + 1
        conflict = _first((before != 0) & (before != mark) & (before != program + 1), before)
        written.writers[cells] = mark
        if conflict is None:
            return None
        place, writer = conflict
        return Conflict("write", region, int(addresses[place]), program, writer)

    def read(self, region: Region, addresses: np.ndarray, width: int, program: int) -> None:
        """Loads; looked at in `read_conflicts`, since the write may come later."""
        self._reads.append((region, addresses, width, program))

    def read_one(self, region: Region, address: int, width: int, program: int) -> None:
        """See `read`; one number."""
        key = (id(region), width)
        if key not in self._single_reads:
            self._single_reads[key] = _SingleReads(region)
        self._single_reads[key].places.add((address, program))

    def _all_reads(self) -> Iterator[tuple[Region, np.ndarray, int, int | np.ndarray]]:
        """Region, addresses, width, and the one program or each one's."""
        yield from self._reads
        for (_, width), reads in self._single_reads.items():
            if reads.region.storage in self._written:
                addresses, programs = np.array(list(reads.places)).T
                yield reads.region, addresses, width, programs

    def read_conflicts(self) -> Iterator[Conflict]:
        """The first byte of each load that another program of the launch writes.

        Of all loads of single numbers through one pointer together the first.
        """
        for region, addresses, width, program in self._all_reads():
            written = self._written.get(region.storage) if region.storage else None
            if written is None:
                continue
            cells = written.cells(addresses, width)
            writers = written.writers[cells]
            readers = np.broadcast_to(program, len(addresses))
            conflict = _first((writers != 0) & (writers != readers[:, None] + 1), writers)
            if conflict is not None:
                place, writer = conflict
                yield Conflict("read", region, int(addresses[place]), int(readers[place]), writer)


def _first(conflicting: np.ndarray, writers: np.ndarray) -> tuple[int, int] | None:
    """Access and writer (-1: atomics) of the first conflicting cell, ``[accesses, cells]``."""
    if not conflicting.any():
        return None
    place, cell = np.unravel_index(int(conflicting.argmax()), conflicting.shape)
    writer = int(writers[place, cell])
    return int(place), writer if writer == _ATOMIC else writer - 1
