"""Calls in forked processes: what is imported once, and what no call has of another."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.forking import Forker
from tests.support.on_v2 import ROOT
from tests.support.serving import wait_for_end

NAME = "FORKED_FOR"


def look(name: str) -> dict:
    """Runs in a process of its own; leaves something in it."""
    seen = list(sys.modules.get("left_by_a_call", ()))
    sys.modules["left_by_a_call"] = [name]
    return {
        "process": os.getpid(), "parent": os.getppid(), "environment": os.environ.get(NAME),
        "imported": "fractions" in sys.modules, "seen": seen, "path": sys.path,
    }  # fmt: skip


def fail() -> None:
    print("before the end")
    raise SystemExit(3)


def start_and_wait(path: str) -> None:
    child = os.fork()
    if child:
        Path(path).write_text(f"{os.getpid()} {child}")
    time.sleep(600)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def forker(environment) -> Forker:
    return Forker(environment, ROOT, modules=("fractions",))


def test_calls_share_imports_and_nothing_else(forker, environment, tmp_path):
    more = {**environment, NAME: "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    first = forker.call(look, tmp_path, more, 60, name="first")
    second = forker.call(look, tmp_path, environment, 60, name="second")
    assert first["imported"]
    assert first["process"] != second["process"]
    assert first["parent"] == second["parent"] != os.getpid()
    assert (first["environment"], second["environment"]) == ("1", None)
    assert str(tmp_path) in first["path"]
    assert str(tmp_path) not in second["path"]
    assert first["seen"] == second["seen"] == []


def test_failures_are_shown(forker, environment, tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)fail ended with status 3:.*before the end"):
        forker.call(fail, tmp_path, environment, 60)


@pytest.mark.slow
def test_what_takes_too_long_is_killed_with_what_it_started(forker, environment, tmp_path):
    path = tmp_path / "processes"
    for seconds in (4, 20, 100):  # a busy machine may not come to start anything in the first
        message = f"start_and_wait ended with status none after {seconds} s"
        with pytest.raises(AssertionError, match=message):
            forker.call(start_and_wait, tmp_path, environment, seconds, path=str(path))
        if path.exists():
            break
    started = [int(number) for number in path.read_text().split()]
    left = [psutil.Process(number) for number in started if psutil.pid_exists(number)]
    assert len(started) == 2
    assert wait_for_end(left, 20) == []
    assert forker.call(look, tmp_path, environment, 60, name="after")["imported"]
