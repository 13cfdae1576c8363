"""Runs one item in a process of its own."""

import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.items import Item, environment_of
from benchmarks.gpu.results import FILE, Results, State
from benchmarks.gpu.sizes import ON_A_GPU, TINY

LOG = "log.txt"
_SECONDS_TO_END = 3.0


class ItemRun:
    """One item while it runs."""

    def __init__(self, name: str, folder: Path, tiny: bool) -> None:
        self.folder = folder
        self.tiny = tiny
        self.sizes = TINY if tiny else ON_A_GPU
        self.name = name
        self._results = Results(folder / FILE)
        self._log_start = self._log_size()
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

    def _log_size(self) -> int:
        log = self.folder / LOG
        return log.stat().st_size if log.exists() else 0


def run_item(item: Item, folder: Path, tiny: bool, seconds: float, start_method: str) -> State:
    """Runs an item in a process of its own, with all that it writes in the log.

    Returns:
        "done"; "failed" if any part failed; "timeout"; "ended" if the process was killed.
    """
    context: Any = multiprocessing.get_context(start_method)
    process = context.Process(target=_main, args=(item, folder, tiny), name=item.name)
    before = dict(os.environ)
    os.environ.update(environment_of(item, folder))  # a new interpreter reads it as it starts
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        process.join(seconds)
        if process.is_alive():
            return "timeout"
        return {0: "done", 1: "failed"}.get(process.exitcode, "ended")  # type: ignore[return-value]
    finally:
        _end(process)


def _main(item: Item, folder: Path, tiny: bool) -> None:
    """The process: a session of its own, so that it ends with all of its children."""
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


def _end(process: Any) -> None:
    """Ends the process and its children, whatever they do."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _SECONDS_TO_END
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        process.join(_SECONDS_TO_END)
        while _is_there(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
    if process.is_alive():  # it had no session of its own yet
        process.kill()
    process.join()


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
