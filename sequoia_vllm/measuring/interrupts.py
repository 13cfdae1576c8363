"""Ends what a command starts, for any reason that it ends.

SIGINT and SIGTERM end a program within ten seconds, whatever its main thread does.
"""

import ctypes
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.orphans import children_die_with_this_process, environment

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

    def is_tracker(process: psutil.Process) -> bool:
        with suppress(psutil.Error):  # it has just ended
            return any(_TRACKER in word for word in process.cmdline())
        return False

    below = psutil.Process().children(recursive=True)
    return [one for one in below if one.pid not in spared and not is_tracker(one)]


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


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END = b"\0"


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM, so that it is handled like Ctrl-C; by default it skips all clean-up."""


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code that shells report for a program ended by this signal."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


def interrupted_by() -> int | None:
    """The signal that came within the last block of `signals_end_this`, if one did."""
    return _Signals.first


def forget_signal() -> None:
    """Forgets `interrupted_by`: another command begins in this process, as in tests."""
    _Signals.first = None


def is_ending() -> bool:
    """Whether a signal has come that ends this process (`signals_end_this`)."""
    return _Signals.is_used and _Signals.first is not None


class _Signals:
    first: int | None = None  # the first signal that came within the last block
    is_used = False  # whether a block is open
    # What was blocked before a fork that is being made; never changed in place.
    mask: set[int] = set()  # noqa: RUF012

    def __init__(self) -> None:
        self._is_held = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Interrupts the program as the signal asks, unless it is held."""
        _Signals.first = _Signals.first or number
        if not self._is_held:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds a first signal's interrupt back until the block ends; later signals do nothing."""
        before, self._is_held = _Signals.first, True
        try:
            yield
        finally:
            self._is_held = False
        if before is None and _Signals.first is not None:
            raise Terminated if _Signals.first == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def signals_end_this(spared: Collection[int]) -> Iterator[_Signals]:
    """Ends this process soon after either signal, with all below it except those spared.

    A signal raises a KeyboardInterrupt in the main thread. Processes that run `SECONDS_TO_END`
    later are killed. After two and a half times as long, this process ends without clean-up.
    Ignored signals count, too: scripts start commands in the background with SIGINT ignored.
    In threads that may not handle signals this does nothing.
    """
    signals, outer = _Signals(), _Signals.is_used
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    _Signals.first, _Signals.is_used = None, True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as Python asks for
    watcher = threading.Thread(target=_watch, args=(reader, spared), name="signals", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with _handled(dict.fromkeys(_SIGNALS, signals.handle)):
            yield signals
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, _END)  # forks have the pipe open, too
        watcher.join()
        os.close(writer)
        os.close(reader)
        _Signals.is_used = outer


def _watch(reader: int, spared: Collection[int]) -> None:
    """Kills what is late after a signal, in a thread: the main one may be deep in C code. The pipe
    has a byte for each signal that comes, and `_END` at the end of the block."""
    while (byte := os.read(reader, 1))[0] not in _SIGNALS:
        if byte == _END:
            return
    main, seconds = threading.main_thread().ident, SECONDS_TO_END
    assert main is not None
    if _ends(reader, seconds):
        return
    kill_processes(spared)
    if _ends(reader, seconds):  # the main thread has no process left to wait for
        return
    signal.pthread_kill(main, byte[0])  # once more: libraries swallow interrupts
    if _ends(reader, seconds / 2):
        return
    kill_processes(spared)
    os._exit(128 + byte[0])


def _ends(reader: int, seconds: float) -> bool:
    """Waits so long for the end of the block."""
    poll, deadline = select.poll(), time.monotonic() + seconds
    poll.register(reader, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(1000 * left) and os.read(reader, 1) == _END:
            return True
    return False


def _block() -> None:
    if _Signals.is_used:
        _Signals.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _unblock() -> None:
    if _Signals.is_used:
        signal.pthread_sigmask(signal.SIG_SETMASK, _Signals.mask)


def _begin_fork() -> None:
    """Gives a fork the system's handlers, so that its signals are not taken for this process's."""
    if _Signals.is_used:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        _unblock()
        _Signals.is_used = False


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_begin_fork)


@contextmanager
def interrupts_get_through() -> Iterator[None]:
    """Lets a signal's KeyboardInterrupt leave code that swallows it: vLLM does while an engine
    starts (`zmq_socket_ctx`), and then waits for ever."""

    def unswallowed(previous: Any) -> Any:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                previous(number, frame)
            except KeyboardInterrupt as interrupt:
                raise _Stop(interrupt) from None

        return handle

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    unswallowing = {number: unswallowed(own) for number, own in handlers.items() if callable(own)}
    try:
        with _handled(unswallowing):
            yield
    except _Stop as stop:
        raise stop.args[0] from None


class _Stop(BaseException):
    """Carries an interrupt, its argument, out of vLLM."""


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
def engines_end_here() -> Iterator[None]:
    """Ends all processes started within the block, and removes their temporary files."""
    with _temporary_files(), processes_end_here():
        yield


@contextmanager
def processes_end_here() -> Iterator[None]:
    """Ends all processes started within the block, also if this process is killed; earlier ones are
    left alone. Within it either signal ends this process in any case (`signals_end_this`)."""
    spared = {process.pid for process in descendants()}
    with adopted_orphans(), children_die_with_this_process(), signals_end_this(spared) as signals:
        try:
            yield
        finally:
            with signals.held():  # a second signal must not keep them from ending
                end_processes(spared)


@contextmanager
def _temporary_files() -> Iterator[None]:
    """Keeps engines' temporary files in one folder, and removes it at the end; torch's compiled
    code stays where it is, for later engines."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    compiled = chosen or str(Path(default_cache_dir()).absolute())
    with (
        tempfile.TemporaryDirectory(prefix="sequoia-", ignore_cleanup_errors=True) as folder,
        environment(TORCHINDUCTOR_CACHE_DIR=compiled, TMPDIR=folder),
        patched(tempfile, "tempdir", folder),
    ):
        yield
