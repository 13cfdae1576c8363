"""What the tests of ending commands share: processes in the background, and those left behind."""

import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import psutil

ENDED = {
    signal.SIGINT: (130, -signal.SIGINT),
    signal.SIGTERM: (143, -signal.SIGTERM),
    signal.SIGKILL: (-signal.SIGKILL,),
}  # exit codes


def still_there(variable: str, known: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Processes that began with this environment variable, and known ones, as far as they run.

    Engines overwrite their environment with a title, so a caller must know them before.
    """
    found = []
    for process in {*psutil.process_iter(), *known}:
        with suppress(psutil.Error):
            is_ours = process in known or variable in process.environ()
            if is_ours and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def in_the_background() -> None:
    """Ignores Ctrl-C, as shells do for what scripts start in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def in_the_foreground() -> None:
    """Takes Ctrl-C, as a terminal's commands do, also if the tests run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(
    shows: Callable[[], Any], seconds: float = 60, what: str = "it", pause: float = 0.01
) -> Any:
    """The first result that is true, within a time that is long enough on however slow a machine.

    Raises AssertionError where `what` did not happen; there are so many seconds between calls.
    """
    end = time.monotonic() + seconds
    while not (found := shows()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(pause)
    return found
