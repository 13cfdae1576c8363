"""What every stage works with."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.gpu.check.machine import Machine
from benchmarks.gpu.check.report import Check, PartTime, StageReport
from benchmarks.gpu.check.timing import Time, Timer, Work


class StageRun:
    """One stage while it runs.

    Args:
        say: Gets a line whenever something is done.
    """

    def __init__(
        self, machine: Machine, timer: Timer, tiny: bool, say: Callable[[str], None]
    ) -> None:
        self.machine = machine
        self.timer = timer
        self.tiny = tiny
        self.found = StageReport()
        self._say = say

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Keeps a failure from ending the stage: time on a GPU is short, and the rest counts."""
        try:
            yield
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{what}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            self.found.failures.append(text)
            self._say(f"FAILED {text}")
        if not self.machine.interpreted:
            torch.cuda.empty_cache()

    def check(self, name: str, error: float, limit: float) -> None:
        """Keeps a comparison; NaN does not pass, and is kept as the largest number."""
        passed = error <= limit
        kept = error if error < 1e30 else 1e30
        self.found.checks.append(Check(name, kept, limit, passed))
        self._say(f"{'ok' if passed else 'WRONG':5} {name}: {error:.3g} (at most {limit:.3g})")

    def time_part(
        self, part: str, works: Sequence[Work], *, model: str = "", batch_size: int = 1,
        context_length: int = 0, tokens: int = 1, vocabulary: int = 0,
    ) -> Time:  # fmt: skip
        """Times a part of a step and keeps it; see `PartTime`."""
        time = self.timer.time(works)
        self.found.parts.append(
            PartTime(
                part, model, batch_size, context_length, tokens, vocabulary,
                time.seconds, time.spread,
            )
        )  # fmt: skip
        self._say(
            f"{part} {model} batch {batch_size} context {context_length} tokens {tokens}"
            f" vocabulary {vocabulary}: {1e3 * time.seconds:.4f} ms"
        )
        return time

    def say(self, line: str) -> None:
        """Tells that something is done."""
        self._say(line)
