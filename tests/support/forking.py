"""Calls functions in processes that are forked from one which has imported vLLM."""

import atexit
import json
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.calling import checked_answer, kill_family

# vLLM, as far as every engine needs it.
MODULES = ("tests.support.engines",)


class Forker:
    """A process that imports vLLM once, and forks for each call (`tests.support.forked`).

    Importing takes longer than most engines do. The process starts with the first call, and
    ends with this one.

    Args:
        environment: Variables with which vLLM is imported.
        directory: Working directory of the process and of all calls.
        modules: What is imported.
    """

    def __init__(
        self, environment: dict[str, str], directory: Path, modules: tuple[str, ...] = MODULES
    ) -> None:
        self._environment = environment
        self._directory = directory
        self._modules = modules
        self._process: psutil.Popen | None = None

    def call(
        self,
        function: Callable[..., Any],
        directory: Path,
        environment: dict[str, str],
        timeout: float,
        **arguments: Any,
    ) -> Any:
        """What `function(**arguments)` returns in a process of its own.

        As `call_in_process`, to which this is the same but for what is imported already:
        variables of `environment` that are read by imports are those of this object, only
        PYTHONPATH may have more folders.
        """
        result, log = directory / "result.json", directory / "log"
        result.unlink(missing_ok=True)
        if self._process is None:
            self._process = self._started(log)
        order = {
            "call": [function.__module__, function.__name__, arguments, str(result)],
            "environment": environment,
            "log": str(log),
        }
        status = None
        try:
            status = self._status(order, timeout)
        finally:
            if status is None:
                kill_family(self._process)
                self._process = None
        reached = f"none after {timeout:.0f} s" if status is None else status
        return checked_answer(function, reached, result, log)

    def _started(self, log: Path) -> psutil.Popen:
        with log.open("wb") as output:
            process = psutil.Popen(
                [sys.executable, "-m", "tests.support.forked", *self._modules],
                cwd=self._directory, env=self._environment, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            )  # fmt: skip
        atexit.register(_end, process)
        return process

    def _status(self, order: dict[str, Any], timeout: float) -> int | None:
        """The exit status of the process that is forked; None if there is none in time."""
        assert self._process is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        line = self._process.stdout.readline() if ready else ""
        return int(line) if line else None


def _end(process: psutil.Popen) -> None:
    """There are no more calls."""
    with suppress(BrokenPipeError):  # it was killed
        process.stdin.close()
    process.wait()
