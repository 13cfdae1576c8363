"""Runs one item in a process of its own."""

import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.items import Item, environment_of
from benchmarks.gpu.results import FILE, Results, State
from benchmarks.gpu.sizes import ON_A_GPU, TINY
from sequoia_vllm.measuring.interrupts import processes_end_here

LOG = "log.txt"


class ItemRun:
    """One item while it runs."""

    def __init__(self, name: str, folder: Path, tiny: bool) -> None:
        self.folder = folder
        self.tiny = tiny
        self.sizes = TINY if tiny else ON_A_GPU
        self.name = name
        self._results = Results(folder / FILE)
        log = folder / LOG
        self._log_start = log.stat().st_size if log.exists() else 0
        self.has_failed = False

    def measure(self, part: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Keeps what ``measure()`` returns, unless an earlier run has this part.

        An error is kept as well and ends this part alone: time on a GPU is short.
        """
        if part in self._results.of(self.name).parts:
            return
        print(f"--- {self.name}: {part}", flush=True)
        with self.attempt(part):
            self.record(part, measure())

    def record(self, part: str, values: dict[str, Any]) -> None:
        """Keeps values of a part, also where an earlier run had some."""
        self._results.add(self.name, part=part, values=values)

    @contextmanager
    def attempt(self, part: str) -> Iterator[None]:
        """Keeps an error of this part instead of raising it."""
        try:
            yield
        except Exception as error:
            self.has_failed = True
            traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            self._results.add(self.name, part=part, error=text[:2000])

    def log_lines(self) -> list[str]:
        """What this item's processes have written to the log so far."""
        sys.stdout.flush()
        sys.stderr.flush()
        with (self.folder / LOG).open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace").splitlines()


def run_item(item: Item, folder: Path, tiny: bool, seconds: float, start_method: str) -> State:
    """Runs an item in a process of its own, with all that it writes in the log.

    Returns:
        "done"; "failed" if any part failed; "timeout"; "ended" if the process was killed.
    """
    context: Any = multiprocessing.get_context(start_method)
    process = context.Process(target=_main, args=(item, folder, tiny), name=item.name)
    try:
        with processes_end_here():
            with patch.dict(os.environ, environment_of(item, folder)):
                process.start()  # a new interpreter reads it as it starts
            process.join(seconds)
            if process.is_alive():
                return "timeout"
            return {0: "done", 1: "failed"}.get(process.exitcode, "ended")  # type: ignore[return-value]
    finally:
        if process.is_alive():  # where psutil is missing, which finds the others: a bare machine
            process.kill()
            process.join()


def _main(item: Item, folder: Path, tiny: bool) -> None:
    """The process, in a session of its own: Ctrl-C comes to the command alone, which ends it."""
    os.setsid()
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(f"=== {item.name}", flush=True)
    run = ItemRun(item.name, folder, tiny)
    with run.attempt("all of it"):
        module, function = item.measure.split(":")
        measure = getattr(importlib.import_module(module), function)
        measure(run, **item.options)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(int(run.has_failed))
