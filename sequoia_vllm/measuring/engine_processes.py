"""Ends engines and removes their files when the command that started them ends, for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_SECONDS_TO_END = 10.0
_SET_CHILD_SUBREAPER = 36  # of prctl
# It cleans /dev/shm after other processes, and ends by itself when they have ended.
_TRACKER = "from multiprocessing.resource_tracker import main"


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM, so that it is handled like Ctrl-C; by default it skips all clean-up."""

    came = False  # since a command began to listen for it


def last_interrupt() -> KeyboardInterrupt:
    """The interrupt that ended a measurement, for raising it again after its counts are saved."""
    return Terminated() if Terminated.came else KeyboardInterrupt()


@contextmanager
def engines_end_here() -> Iterator[None]:
    """Ends all processes started within the block, and removes their temporary files.

    Within the block, SIGTERM raises `Terminated`. Earlier processes are left alone.
    """
    before = {process.pid for process in _descendants()}
    with _temporary_files(), _adopted_orphans(), sigterm_raises():
        try:
            yield
        finally:
            # A second signal must not keep this process from ending its engines.
            with _handled(dict.fromkeys((signal.SIGTERM, signal.SIGINT), signal.SIG_IGN)):
                _end_processes(before)


@contextmanager
def interrupts_get_through() -> Iterator[None]:
    """Lets a signal's KeyboardInterrupt leave code that swallows it.

    vLLM swallows it while an engine starts (`zmq_socket_ctx`), and then waits for ever.

    Raises:
        KeyboardInterrupt: The one that the signal's handler raised.
    """

    def unswallowed(previous: Any) -> Any:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                previous(number, frame)
            except KeyboardInterrupt as interrupt:
                raise _Stop(interrupt) from None

        return handle

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    unswallowing = {number: unswallowed(own) for number, own in handlers.items() if callable(own)}
    try:
        with _handled(unswallowing):
            yield
    except _Stop as stop:
        raise stop.interrupt from None


class _Stop(BaseException):
    """Carries an interrupt out of vLLM."""

    def __init__(self, interrupt: KeyboardInterrupt) -> None:
        super().__init__(interrupt)
        self.interrupt = interrupt


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code that shells report for a program ended by this signal."""
    ended_by = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
    return 128 + ended_by


def _descendants() -> list[Any]:
    import psutil  # vLLM depends on it

    return [
        process
        for process in psutil.Process().children(recursive=True)
        if not any(_TRACKER in word for word in _command(process))
    ]


def _command(process: Any) -> list[str]:
    import psutil

    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.Error:  # it has just ended
        return []


def _end_processes(spared: set[int]) -> None:
    """Ends all other descendants: terminates them first, kills them after the deadline."""
    import psutil

    deadline = time.monotonic() + _SECONDS_TO_END
    asked: set[int] = set()
    while rest := [process for process in _descendants() if process.pid not in spared]:
        late = time.monotonic() > deadline
        for process in rest:
            if not late and process.pid in asked:
                continue
            try:
                process.kill() if late else process.terminate()
            except psutil.Error:
                continue
            asked.add(process.pid)
        psutil.wait_procs(rest, timeout=0.2)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM raise `Terminated` within the block, if in the main thread."""
    here = os.getpid()
    Terminated.came = False

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() == here:
            Terminated.came = True
            raise Terminated
        os._exit(128 + number)  # a fork that has set no handler of its own yet

    with _handled({signal.SIGTERM: terminate}):
        yield


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Gives signals these handlers; does nothing in threads that may not set any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _adopted_orphans() -> Iterator[None]:
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


@contextmanager
def _temporary_files() -> Iterator[None]:
    """Keeps engines' temporary files in one folder, and removes it at the end.

    Torch's compiled code stays where it is, for later engines.
    """
    kept = {name: os.environ.get(name) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")}
    previous = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="sequoia-", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _compiled_files())
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = previous
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _compiled_files() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return str(Path(default_cache_dir()).absolute())
