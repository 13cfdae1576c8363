"""What an engine runs and maps, and what of it is left when the engine has ended."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from tests.support.serving import wait_for_end

END_DEADLINE = 60.0  # seconds; an idle two-core machine needs 2


def footprint(parents: Iterable[psutil.Process]) -> dict[str, Any]:
    """These processes with those that they started, and the files in /dev/shm that they share."""
    family = {one for parent in parents for one in (parent, *parent.children(recursive=True))}
    return {
        "processes": [[process.pid, process.create_time()] for process in family],
        "shared_memory": sorted({path for process in family for path in shared_memory(process)}),
    }


def shared_memory(process: psutil.Process) -> list[str]:
    """Mapped files of /dev/shm that still have their name, so that they can be left behind."""
    paths = {entry.path for entry in process.memory_maps(grouped=True)}
    return [path for path in paths if path.startswith("/dev/shm/") and Path(path).exists()]


def left_behind(found: dict[str, Any]) -> tuple[list[psutil.Process], list[str]]:
    """Which of a footprint's processes still run, and which of its files lie there still.

    Waits for the processes to end, kills those that do not, and removes the files.
    """
    family = [same_process(number, created) for number, created in found["processes"]]
    running = wait_for_end([process for process in family if process], END_DEADLINE)
    for process in running:
        process.kill()
    files = [path for path in found["shared_memory"] if Path(path).exists()]
    for path in files:
        Path(path).unlink()
    return running, files


def same_process(number: int, created: float) -> psutil.Process | None:
    """The process of this id, unless it is another one that was given the id since."""
    try:
        process = psutil.Process(number)
        return process if process.create_time() == created else None
    except psutil.NoSuchProcess:
        return None
