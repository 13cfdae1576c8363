"""What the check of kernels works with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.check.machine import Machine
from benchmarks.gpu.check.timing import Time, Work, make_timer
from benchmarks.gpu.item_run import ItemRun


class KernelRun:
    """An item's run, with the device and a timer for it."""

    def __init__(self, run: ItemRun) -> None:
        self.machine = Machine.find(run.tiny)
        self.timer = make_timer(self.machine)
        self.tiny = run.tiny
        self._run = run

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Keeps a failure from ending the check: time on a GPU is short, and the rest counts."""
        with self._run.attempt(what):
            yield
        if not self.machine.interpreted:
            torch.cuda.empty_cache()

    def check(self, name: str, error: float, limit: float) -> None:
        """Keeps a comparison; one that is wrong is an error of the run, and NaN is wrong."""
        self._run.record(name, {"error": error if error < 1e30 else 1e30, "limit": limit})
        with self._run.attempt(name):
            assert error <= limit, f"wrong by {error:.3g}, at most {limit:.3g} is right"

    def time(self, name: str, works: Sequence[Work], **more: Any) -> Time:
        """Times a part of a step, the mean of ``works``, and keeps it with what ``more`` says."""
        time = self.timer.time(works)
        self._run.record(name, {"seconds": time.seconds, "spread": time.spread, **more})
        return time
