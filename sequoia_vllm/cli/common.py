"""What all commands share: errors without traceback, JSON output."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sequoia_vllm.errors import SequoiaError

USAGE_ERROR = 2
_UNLIMITED = 10_000  # columns


def console() -> Console:
    """Standard output; without a terminal lines have any length, for programs that read them."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNLIMITED
    return console


def error_console() -> Console:
    """Standard error: notes, progress and errors, so that ``--json`` output stays clean."""
    return Console(stderr=True)


def new_table(*columns: str, title: str | None = None, left: Collection[str] = ()) -> Table:
    """Returns a table without borders; columns are right-aligned but for those in ``left``."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False,
        header_style="bold",
    )  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turns our errors into one message and exit code 2.

    Their messages name the fix. Any other error is a bug and keeps its traceback.
    """
    try:
        yield
    except SequoiaError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or 'file'}: {error.strerror or error}")


def fail(message: str, code: int = USAGE_ERROR) -> NoReturn:
    """Prints the message and ends with this exit code."""
    error_console().print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def note(message: str) -> None:
    """Prints a remark to standard error."""
    error_console().print(f"[yellow]note:[/] {escape(message)}", soft_wrap=True)


def print_json(data: Any) -> None:
    """Prints one plain JSON object, with lists of numbers on one line."""
    from sequoia_vllm.json_file import dump_json

    typer.echo(dump_json(data), nl=False)


@contextmanager
def engines_print_to_stderr() -> Iterator[None]:
    """Sends what engines and their processes print to standard error."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(ours, 1)
        os.close(ours)
