"""How far long commands are, where no terminal shows a bar."""

import io
import re
import threading
import time

import pytest
from rich.console import Console

from sequoia_vllm.cli import common
from sequoia_vllm.cli.common import ProgressLines, progress_bar
from sequoia_vllm.cli.measuring import measuring


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now

    def after(self, seconds):
        self.now += seconds


@pytest.fixture
def lines():
    clock = Clock()
    return ProgressLines("profile:", clock), clock


def test_a_line_says_what_is_done_and_what_is_left(lines):
    lines, clock = lines
    clock.after(40)
    lines.report("starting the engine", 0, 1)
    assert lines.line() == "profile: starting the engine; 0:40 so far"
    clock.after(20)
    lines.report("batch 1, 4 tokens", 0, 24)
    assert lines.line() == "profile: batch 1, 4 tokens; 1:00 so far, 0 of 24 done"
    clock.after(25)
    lines.report("batch 4, 8 tokens", 5, 24)
    # Starting the engine is not counted: 5 seconds a run.
    assert lines.line() == (
        "profile: batch 4, 8 tokens; 1:25 so far, 5 of 24 done, about 1:35 left"
    )
    clock.after(3)
    assert lines.line().endswith("about 1:32 left")
    clock.after(12)  # a long step: it counts when it ends
    assert lines.line().endswith("about 1:30 left")
    lines.report("batch 4, 16 tokens", 6, 24)
    assert lines.line().endswith("about 2:00 left")


def test_nothing_is_left_after_the_last_step(lines):
    """What follows it is not counted; once it showed as a negative time."""
    lines, clock = lines
    lines.report("trees", 0, 10)
    clock.after(100)
    lines.report("trees", 10, 10)
    clock.after(30)
    assert lines.line() == "profile: trees; 2:10 so far, 10 of 10 done"


def printed_after(text, count, capfd, seconds=10.0):
    """What lies in standard error once ``text`` was there so often."""
    found, end = "", time.monotonic() + seconds
    while found.count(text) < count and time.monotonic() < end:
        time.sleep(0.005)
        found += capfd.readouterr().err
    return found


def test_lines_go_to_standard_error_while_a_step_takes_long(capfd, monkeypatch):
    monkeypatch.setattr(common, "LINE_SECONDS", 0.01)
    with measuring("acceptance:", "interrupted") as report:
        report("starting the engine", 0, 1)
        assert "acceptance: starting the engine" in printed_after("starting the engine", 2, capfd)
        report("within 0.2, to be 0.05", 30, 60)
        found = printed_after("30 of 60 done", 1, capfd)
    assert re.search(r"acceptance: within 0.2, to be 0.05; \d:\d\d so far, 30 of 60 done", found)
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    capfd.readouterr()
    time.sleep(0.05)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(
        common, "error_console", lambda: Console(file=terminal, force_terminal=True, width=100)
    )
    monkeypatch.setattr(common, "LINE_SECONDS", 0.01)
    with progress_bar("bench:") as report:
        report("round 1", 3, 8)
        time.sleep(0.05)
        assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert "3/8" in terminal.getvalue()
    assert "so far" not in terminal.getvalue()
