"""What the tests of ending commands share: processes in the background, and those left behind."""

import signal
from contextlib import suppress

import psutil

ENDED = {
    signal.SIGINT: (130, -signal.SIGINT),
    signal.SIGTERM: (143, -signal.SIGTERM),
    signal.SIGKILL: (-signal.SIGKILL,),
}  # exit codes


def processes_with(variable: str) -> list[psutil.Process]:
    """Processes that began with this environment variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if variable in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def in_the_background() -> None:
    """Ignores Ctrl-C, as shells do for what scripts start in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
