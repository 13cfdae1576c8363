"""A clock of simulated seconds in a file: a server's steps move it, and its client reads it."""

import struct
from mmap import mmap
from pathlib import Path

from tests.support.open_loop import Machine

VARIABLE = "TESTS_STEP_CLOCK"
"""Names the file."""
# Slow: a few dozen steps take seconds.
MACHINE = Machine(
    weights=0.05, row=5e-4, context=1.5e-7, tree_context=1.5e-7, noise=0, disturbed=0
)  # fmt: skip
_SECONDS = struct.Struct("d")


class StepClock:
    """What time it is on a simulated machine."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(_SECONDS.pack(0.0))
        with file.open("r+b") as opened:
            self._memory = mmap(opened.fileno(), _SECONDS.size)

    @property
    def now(self) -> float:
        return _SECONDS.unpack(self._memory[:])[0]

    def move(self, seconds: float) -> None:
        self._memory[:] = _SECONDS.pack(self.now + seconds)
