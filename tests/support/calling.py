"""Calls functions of the tests in processes of their own, with an environment of their own."""

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.serving import Session, has_ended


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
