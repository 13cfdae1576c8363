"""Processes that our commands start die with their parent, even if that is killed (Linux).

vLLM's workers notice the death of their engine core, but only once they are ready. Its engine
cores notice nothing. What a user's own ``vllm serve`` starts is left alone.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

# Set by a command, then by each process that it starts, to its own process ID.
_PARENT = "SEQUOIA_VLLM_PARENT"
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Sets environment variables, and puts back what they were when the block ends."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def children_die_with_this_process() -> AbstractContextManager[None]:
    """Makes processes that start within the block die with this one, and their children, too: forks
    at once, spawned processes after they import this package."""
    _also_in_forks()
    return environment(**{_PARENT: str(os.getpid())})


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent dies, if a command of ours started it."""
    parent = os.environ.get(_PARENT)
    if parent is None or int(parent) == os.getpid() or not sys.platform.startswith("linux"):
        return
    import ctypes

    if _started_by_main_thread():
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.environ[_PARENT] = str(os.getpid())
    _also_in_forks()
    if not _is_alive(int(parent)):  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


@cache
def _also_in_forks() -> None:
    os.register_at_fork(after_in_child=die_with_parent)


def _started_by_main_thread() -> bool:
    """Whether the parent's main thread did: the signal comes when the thread ends."""
    parent = os.getppid()
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
    except OSError:  # the parent has just died, or the kernel keeps no such list
        return True
    return str(os.getpid()) in children.split()


def _is_alive(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
