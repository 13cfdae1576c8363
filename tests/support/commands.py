"""Commands of `sequoia-vllm`, run in this process; and programs in their own."""

import logging
import subprocess
import sys
from subprocess import CompletedProcess
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from sequoia_vllm.cli import app


def command(*words: object, code: int = 0) -> Result:
    """Runs it, and checks that it ends with this code and without a bug's traceback."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    for handler in logging.getLogger("vllm").handlers:
        # Each engine that starts has vLLM write to the output of that moment: the command's.
        if isinstance(handler, logging.StreamHandler) and handler.stream.closed:
            handler.stream = sys.stderr
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output, done.output
    return done


def in_words(text: str) -> str:
    """Without the line breaks of a terminal's width."""
    return " ".join(text.split())


def python(code: str, *options: str, ends_with: int = 0, **where: Any) -> CompletedProcess:
    """A program in a process of its own; checks that it ends with this code."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=300,
        check=False, **where,
    )  # fmt: skip
    assert done.returncode == ends_with, done.stderr
    return done
