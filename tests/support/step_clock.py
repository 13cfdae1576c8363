"""A clock of simulated seconds in a file: a server's steps move it, and its client reads it."""

import struct
from dataclasses import replace
from mmap import mmap
from pathlib import Path

from tests.support.open_loop import Machine

VARIABLE, WHICH = "TESTS_STEP_CLOCK", "TESTS_STEP_MACHINE"
"""Name the file, and one of `MACHINES`."""
# A few dozen steps take seconds. A level of the draft takes a twelfth of a target's pass.
MACHINE = Machine(weights=0.05, row=5e-4, context=1.5e-7, tree_context=1.5e-7, noise=0, disturbed=0)
MACHINES = {"slow target": MACHINE, "target as fast as its draft": replace(MACHINE, draft=1.0)}
_NOTED = struct.Struct("ddd")


class StepClock:
    """What time it is on a simulated machine, and how many tokens its requests had until then.

    And how many requests a client has sent: the machine waits for all of them.
    """

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(_NOTED.pack(0.0, 0.0, 0.0))
        with file.open("r+b") as opened:
            self._memory = mmap(opened.fileno(), _NOTED.size)

    @property
    def now(self) -> float:
        return self._noted[0]

    @property
    def tokens(self) -> float:
        """Sum over all steps of the tokens that a running request received in the mean."""
        return self._noted[1]

    @property
    def sent(self) -> float:
        return self._noted[2]

    def move(self, seconds: float, tokens: float = 0.0) -> None:
        self._add(seconds, tokens, 0.0)

    def send(self, requests: int) -> None:
        """To be called while the machine is idle: the file has no lock."""
        self._add(0.0, 0.0, requests)

    def _add(self, *more: float) -> None:
        self._memory[:] = _NOTED.pack(*map(sum, zip(self._noted, more, strict=True)))

    @property
    def _noted(self) -> tuple[float, float, float]:
        return _NOTED.unpack(self._memory[:])
