"""Calls functions of the tests in processes of their own, with an environment of their own."""

import atexit
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

import psutil
import pytest

from tests import quick_start
from tests.support.serving import ROOT, Session, has_ended

# vLLM, as far as every engine needs it.
MODULE = "tests.support.engines"
# Seconds for a test's process: a little less than pytest gives the test itself.
DEADLINE = float(os.environ.get("PYTEST_TIMEOUT", 600)) - 20
_START_DEADLINE = 200.0  # seconds; importing takes seven on an idle machine


def environment_with(*folders: Path | str, **variables: str) -> dict[str, str]:
    """This process's, with these folders and this repository on the path; engines stay in it."""
    path = os.pathsep.join(map(str, (quick_start.FOLDER, *folders, ROOT)))
    common = {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    return os.environ | common | variables


def call_in_process(
    function: Callable[..., Any],
    directory: Path,
    environment: dict[str, str],
    timeout: float,
    working_directory: Path,
    **arguments: Any,
) -> Any:
    """What `function(**arguments)` returns in a process of its own.

    The function is imported there by its module and name, so it stands at the
    top of a module; arguments and result are what JSON can hold. `directory`
    takes the files of the call, and `environment` has this repository in its
    PYTHONPATH. Raises AssertionError, with the end of the
    process's output, when it fails or is not done after `timeout` seconds; then
    the processes that it started are killed, too.
    """
    result, log = directory / "result.json", directory / "log"
    result.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "tests.support.called", function.__module__, function.__name__,
        json.dumps(arguments), str(result),
    ]  # fmt: skip
    process = Session(command, environment, log, working_directory).process
    try:
        status = process.wait(timeout)
    except psutil.TimeoutExpired:
        status = f"none after {timeout:.0f} s"
    finally:
        kill_family(process)
    return checked_answer(function, status, result, log)


def kill_family(process: psutil.Process) -> None:
    if not has_ended(process):
        for one in [*process.children(recursive=True), process]:
            one.kill()


def checked_answer(function: Callable[..., Any], status: int | str, result: Path, log: Path) -> Any:
    """What the function returned, of a process that ended so: AssertionError if not with 0."""
    if status != 0:
        tail = log.read_text(errors="replace")[-8000:]
        raise AssertionError(f"{function.__name__} ended with status {status}:\n{tail}")
    return json.loads(result.read_text())


def called_once(
    call: Callable[..., Any], function: Callable[..., Any],
    each: tuple[str, Sequence[Any]] | None = None, **arguments: Any,
) -> Any:  # fmt: skip
    """A module's fixture: what the function gives in a process of its own.

    A parameter that is not given and has no default gets the folder of the call.
    `each`: a parameter, and values for each of which the function is called.
    """

    @pytest.fixture(scope="module", params=each and each[1])
    def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
        folder = tmp_path_factory.mktemp("called")
        parameters = inspect.signature(function).parameters.values()
        names = [one.name for one in parameters if one.default is one.empty]
        own = {each[0]: request.param} if each else {}
        return call(function, folder, **{**dict.fromkeys(names, str(folder)), **arguments, **own})

    return answers


# -- processes that are forked from one which has imported vLLM ------------------------------


class _Line(NamedTuple):
    """Orders go to, and answers come from, a process that forks for each order."""

    process: psutil.Process
    orders: TextIO
    answers: TextIO


class Forker:
    """A process that imports vLLM once, and forks for each call (`tests.support.forked`).

    Importing takes longer than most engines do. The process starts with the first call of any
    worker of a run of tests, and ends with that worker.

    Args:
        environment: Variables with which vLLM is imported.
        directory: Working directory of the process and of all calls.
        name: Of what is imported so.
    """

    def __init__(self, environment: dict[str, str], directory: Path, name: str) -> None:
        self._environment = environment
        self._directory = directory
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        # Short, as paths of sockets have to be.
        self._path = Path(tempfile.gettempdir()) / f"forker-{run[:12]}-{name}"
        self._line: _Line | None = None

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
        if self._line is None:
            self._line = self._connect()
        order = {
            "call": [function.__module__, function.__name__, arguments, str(result)],
            "environment": environment,
            "log": str(log),
        }
        status = None
        try:
            status = self._status(self._line, order, timeout)
        finally:
            if status is None:
                kill_family(self._line.process)
                self._line = None
        reached = f"none after {timeout:.0f} s" if status is None else status
        return checked_answer(function, reached, result, log)

    def _connect(self) -> _Line:
        with suppress(FileExistsError):  # another worker starts it, or this one has
            Path(f"{self._path}.lock").touch(exist_ok=False)
            self._start(self._path)
        return _line_to(self._path)

    def _start(self, path: Path) -> None:
        with Path(f"{path}.log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked", str(path), MODULE],
                cwd=self._directory, env=self._environment, start_new_session=True,
                stdin=subprocess.PIPE, stdout=output, stderr=output,
            )  # fmt: skip
        process.wait()  # the one that imports goes on as an orphan
        assert process.stdin is not None
        atexit.register(_end, process.stdin, path)

    def _status(self, line: _Line, order: dict[str, Any], timeout: float) -> int | None:
        """The exit status of the process that is forked; None if there is none in time."""
        print(json.dumps(order), file=line.orders, flush=True)
        ready, _, _ = select.select([line.answers], [], [], timeout)
        answer = line.answers.readline() if ready else ""
        return int(answer) if answer else None


def _line_to(path: Path) -> _Line:
    """Waits for a process that has imported what it forks with, and connects to it."""
    deadline = time.monotonic() + _START_DEADLINE
    while time.monotonic() < deadline:
        with suppress(OSError):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(path))
            answers = connection.makefile("r")
            process = psutil.Process(int(answers.readline()))
            return _Line(process, connection.makefile("w"), answers)
        time.sleep(0.1)
    log = Path(f"{path}.log")
    raise TimeoutError(log.read_text(errors="replace")[-8000:] if log.exists() else str(path))


def _end(until: IO[bytes], path: Path) -> None:
    """No more calls are made from here; those of other workers go on."""
    with suppress(BrokenPipeError):  # it was killed
        until.close()
    for file in (path, f"{path}.log", f"{path}.lock"):
        Path(file).unlink(missing_ok=True)
