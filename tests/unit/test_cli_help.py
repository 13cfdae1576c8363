"""What help shows, and what is read of options: in all commands alike."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sequoia_vllm.cli import AliasedCommand, app

ROOT = Path(__file__).parents[2]


def test_narrow_help_shows_whole_names():
    shown = CliRunner().invoke(app, ["tune", "-h"], env={"COLUMNS": "80"}).output
    assert "--tensor-parallel-size" in shown
    assert "x>=1" in shown


@pytest.mark.parametrize("command", ["advise", "bench", "demo", "tune"])
def test_narrow_help_breaks_lines_where_they_are_full(command):
    shown = CliRunner().invoke(app, [command, "-h"], env={"COLUMNS": "80"}).output
    text = [line.strip() for line in shown.split("╭")[0].splitlines()]
    broken = [one for one, next_ in pairwise(text) if one and next_]
    assert broken
    assert min(map(len, broken)) > 60


@pytest.mark.parametrize(
    "given",
    [
        ["--model", "t", "--draft-model", "d"], ["--target", "t", "--draft", "d"],
        ["--target=t", "--draft=d"],
    ],
)  # fmt: skip
def test_models_are_named_alike_in_all_commands(given):
    own = typer.Typer()

    @own.command(cls=AliasedCommand)
    def measure(model: str = typer.Option(), draft_model: str = typer.Option()) -> None:
        typer.echo(f"{model} {draft_model}")

    assert CliRunner().invoke(own, given).stdout == "t d\n"
    assert "--target" not in CliRunner().invoke(own, ["--help"]).output


def test_advise_takes_its_model_as_other_commands_do():
    for given in (["nosuch"], ["--model", "nosuch"], ["--target=nosuch", "--batch", "2"]):
        done = CliRunner().invoke(app, ["advise", *given, "--draft", "d"])
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
    done = subprocess.run(
        [sys.executable, "-c", NOWHERE], capture_output=True, text=True, timeout=300, check=True,
        env=quiet,
    )  # fmt: skip
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
    done = subprocess.run(
        [sys.executable, "-c", TYPOS], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
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
    code = NOISY.format(shown=shown, error=error)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr[: len(stderr)] == stderr
    assert error or done.stderr == stderr
    assert done.stdout == ("" if error else "result\n")
