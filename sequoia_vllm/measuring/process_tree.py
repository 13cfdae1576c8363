"""The processes that this process has started: finds them, and ends them."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Engine cores that are still starting ignore SIGTERM: these are killed after so long.
SECONDS_TO_END = 3.0
_SET_CHILD_SUBREAPER = 36  # of prctl
# It cleans /dev/shm after other processes, and ends by itself when they have ended.
_TRACKER = "from multiprocessing.resource_tracker import main"


def descendants(spared: Collection[int] = ()) -> list[Any]:
    """All processes below this one, except those with these IDs and Python's resource tracker."""
    try:
        import psutil  # vLLM depends on it; without vLLM no engine runs
    except ImportError:
        return []
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in spared and not any(_TRACKER in word for word in _command(process))
    ]


def _command(process: Any) -> list[str]:
    import psutil

    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.Error:  # it has just ended
        return []


def kill_processes(spared: Collection[int]) -> None:
    """Kills all descendants, except those spared."""
    for process in descendants(spared):
        with suppress(Exception):  # it has just ended
            process.kill()


def end_processes(spared: Collection[int]) -> None:
    """Ends all descendants, except those spared: terminates them first, kills them if late."""
    deadline = time.monotonic() + SECONDS_TO_END
    asked: set[int] = set()
    while rest := descendants(spared):
        import psutil

        late = time.monotonic() > deadline
        for process in rest:
            if late or process.pid not in asked:
                with suppress(psutil.Error):
                    process.kill() if late else process.terminate()
                    asked.add(process.pid)
        psutil.wait_procs(rest, timeout=0.2)


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Makes orphans children of this process, so that it can find and end them (Linux)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
