"""What help and progress show, what is read of options, and what is missing: in all commands."""

import io
import os
import re
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from sequoia_vllm.cli import AliasedCommand, app, common
from sequoia_vllm.cli.common import ProgressLines, progress_bar
from sequoia_vllm.cli.measuring import measuring
from tests.support.commands import command, in_words, python
from tests.support.models import DRAFT, TARGET

ROOT = Path(__file__).parents[2]


def test_narrow_help_shows_whole_names():
    shown = CliRunner().invoke(app, ["tune", "-h"], env={"COLUMNS": "80"}).output
    assert "--tensor-parallel-size" in shown
    assert "x>=1" in shown


@pytest.mark.parametrize("name", ["advise", "bench", "demo", "tune", "verify"])
def test_narrow_help_breaks_lines_where_they_are_full(name):
    shown = CliRunner().invoke(app, [name, "-h"], env={"COLUMNS": "80"}).output
    text = [line.strip() for line in shown.split("╭")[0].splitlines()]
    broken = [one for one, next_ in pairwise(text) if one and next_]
    assert broken
    assert min(map(len, broken)) > 60


@pytest.mark.parametrize(
    "words", ["--model t --draft-model d", "--target t --draft d", "--target=t --draft=d"]
)
def test_models_are_named_alike_in_all_commands(words):
    own = typer.Typer()

    @own.command(cls=AliasedCommand)
    def measure(model: str = typer.Option(), draft_model: str = typer.Option()) -> None:
        typer.echo(f"{model} {draft_model}")

    assert CliRunner().invoke(own, words.split()).stdout == "t d\n"
    assert "--target" not in CliRunner().invoke(own, ["--help"]).output


def test_advise_takes_its_model_as_other_commands_do():
    for given in (["nosuch"], ["--model", "nosuch"], ["--target=nosuch", "--batch", "2"]):
        done = command("advise", *given, "--draft", "d", code=2)
        assert "'nosuch' is no folder here" in done.output


NOWHERE = """
import huggingface_hub.constants as c; c.ENDPOINT = "https://nowhere.invalid"
import huggingface_hub.hf_api as api; api.HfApi.model_info = lambda *_, **__: 1 / 0
from sequoia_vllm.cli import app
codes = []
for name in ("nosuch", "no/such"):
    try:
        app(["bench", "--model", name, "--draft", "d"])
    except SystemExit as end:
        codes.append(end.code)
print(codes)
"""


@pytest.mark.slow
def test_models_that_are_nowhere_are_named_at_once():
    """Each in one line, as vLLM is imported before the first and not before the second."""
    pytest.importorskip("vllm")
    quiet = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    done = python(NOWHERE, env=quiet)
    assert done.stdout == "[2, 2]\n"
    first, second = done.stderr.splitlines()
    assert "the target 'nosuch' is no folder here, and a name on the Hub is OWNER/NAME" in first
    assert "the target 'no/such' is no folder here, and https://nowhere.invalid does" in second


TYPOS = """
import sys
from sequoia_vllm.cli import app
for words in (
    "bench --temperature warm", "bench --chain 4:blok", "bench --trees 16x", "bench --dtype flot",
    "bench --batch-sizes x", "bench --prompts no.txt", "demo --chain four",
    "bench --draft-model /no", "demo --model /no", "tune --draft-model /no",
):
    pair = ["--model", "examples/models/target", "--draft-model", "examples/models/draft"]
    try:
        app([words.split()[0], *pair, *words.split()[1:]])
    except SystemExit as end:
        print(end.code, {"torch", "vllm", "transformers"} & set(sys.modules))
"""


def test_typos_end_a_command_before_anything_large_is_loaded():
    done = python(TYPOS, cwd=ROOT)
    assert done.stdout.splitlines() == ["2 set()"] * 10, done.stderr


NOISY = """
import os, subprocess, sys
from sequoia_vllm.cli.common import engines_print_aside, error_console
from sequoia_vllm.errors import SequoiaError
with engines_print_aside(shown={shown}):
    os.write(2, b"of a library\\n")
    subprocess.run(["echo", "of a process"])
    error_console().print("progress")
    {error}
print("result")
"""


@pytest.mark.parametrize(
    ("shown", "error", "stderr"),
    [
        (False, "", "progress\n"),
        (True, "", "of a library\nof a process\nprogress\n"),
        (False, "raise SequoiaError('bad')", "progress\nof a library\nof a process\nTraceback"),
    ],
)
def test_what_engines_print_is_shown_when_something_is_wrong(shown, error, stderr):
    done = python(NOISY.format(shown=shown, error=error), ends_with=bool(error))
    assert done.stderr[: len(stderr)] == stderr
    assert error or done.stderr == stderr
    assert done.stdout == ("" if error else "result\n")


PAIR = ["--model", TARGET, "--draft-model", DRAFT]


@pytest.mark.parametrize(
    "words",
    [
        ["tree", "plot", "h200/70b-1b/shipped", "--output", "tree.svg"],
        ["bench", *PAIR, "--plot", "speeds.svg"],
    ],
    ids=lambda words: words[0],
)
def test_pictures_without_matplotlib_are_refused_before_anything_is_measured(
    words, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in in_words(command(*words, code=2).stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def timed():
    """Lines about progress, and their clock."""
    clock = SimpleNamespace(now=1000.0)
    return ProgressLines("profile:", lambda: clock.now), clock


def test_a_line_says_what_is_done_and_what_is_left(timed):
    lines, clock = timed
    clock.now += 40
    lines.report("starting the engine", 0, 1)
    assert lines.line() == "profile: starting the engine; 0:40 so far"
    clock.now += 20
    lines.report("batch 1, 4 tokens", 0, 24)
    assert lines.line() == "profile: batch 1, 4 tokens; 1:00 so far, 0 of 24 done"
    clock.now += 25
    lines.report("batch 4, 8 tokens", 5, 24)
    # Starting the engine is not counted: 5 seconds a run.
    assert lines.line() == (
        "profile: batch 4, 8 tokens; 1:25 so far, 5 of 24 done, about 1:35 left"
    )
    clock.now += 3
    assert lines.line().endswith("about 1:32 left")
    clock.now += 12  # a long step: it counts when it ends
    assert lines.line().endswith("about 1:30 left")
    lines.report("batch 4, 16 tokens", 6, 24)
    assert lines.line().endswith("about 2:00 left")


def test_nothing_is_left_after_the_last_step(timed):
    """What follows it is not counted; once it showed as a negative time."""
    lines, clock = timed
    lines.report("trees", 0, 10)
    clock.now += 100
    lines.report("trees", 10, 10)
    clock.now += 30
    assert lines.line() == "profile: trees; 2:10 so far, 10 of 10 done"


def printed_after(text, count, capfd):
    """What lies in standard error once ``text`` was there so often."""
    found, end = "", time.monotonic() + 10.0
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
