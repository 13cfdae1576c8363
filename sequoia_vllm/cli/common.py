"""Shared by all commands: consoles, errors without traceback, JSON output, progress."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout, suppress
from tempfile import TemporaryFile
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sequoia_vllm.errors import SequoiaError

USAGE_ERROR = 2
_UNLIMITED = 10_000  # columns
_MOST_SHOWN = 20_000  # bytes of engines' output to show after an error
_terminal: TextIO | None = None  # the real standard error while engines' output is redirected
_above_bar: Console | None = None  # prints above a progress bar, while there is one


class _Console(Console):
    """Prints until the reader closes the pipe, as ``head`` does."""

    def on_broken_pipe(self) -> NoReturn:
        """Ends the program with success: the reader has what it wants."""
        _read_no_more()


def _read_no_more() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(0)


@contextmanager
def ends_quietly() -> Iterator[None]:
    """Ends the program with success if nobody reads its last output."""
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _read_no_more()


_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes


@contextmanager
def ends_by_signal() -> Iterator[None]:
    """Ends the program as soon as a signal has ended the block, with the signal's exit code.

    Python would first wait for threads, and an interrupted clean-up may end in any error.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # while no engine runs they end it at once
    if (interrupts := _interrupts()) is not None:
        interrupts.forget_signal()  # it ended an earlier command of this process
    try:
        yield
    except BaseException as ended:
        if (code := _interrupted(ended)) is not None:
            sys.stderr.flush()
            os._exit(code)
        raise


def _interrupted(ended: BaseException) -> int | None:
    """The exit code of a program that a signal has ended; None: none has."""
    interrupts = _interrupts()
    number = None if interrupts is None else interrupts.interrupted_by()
    if number is not None:
        return 128 + int(number)
    if isinstance(ended, SystemExit) and ended.code in _INTERRUPTED:
        return int(ended.code)
    return None


def _interrupts() -> Any:
    """The module, if a command that starts engines has imported it."""
    return sys.modules.get("sequoia_vllm.measuring.interrupts")


def console() -> Console:
    """Standard output; lines are not wrapped without a terminal, so that programs can read them."""
    console = _Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNLIMITED
    return console


def error_console() -> Console:
    """Standard error: notes, progress and errors, so that ``--json`` output stays clean."""
    if _above_bar is not None:
        return _above_bar
    return Console(stderr=True) if _terminal is None else Console(file=_terminal)


def new_table(
    *columns: str, title: str | None = None, caption: str | None = None, left: Collection[str] = ()
) -> Table:
    """A table without borders; columns are right-aligned, except those in ``left``."""
    table = Table(
        title=title, title_justify="left", title_style="bold", caption=caption, box=None,
        pad_edge=False, header_style="bold",
    )  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turns our errors, and the system's, into one message and exit code 2, and signals into
    theirs; any other error is a bug and keeps its traceback."""
    try:
        yield
    except SequoiaError as error:
        fail(str(error))
    except BrokenPipeError:
        _read_no_more()
    except KeyboardInterrupt as interrupt:
        from sequoia_vllm.measuring.interrupts import exit_code

        raise typer.Exit(exit_code(interrupt)) from None
    except OSError as error:
        fail(f"{error.filename or 'file'}: {error.strerror or error}")


def fail(message: str, code: int = USAGE_ERROR) -> NoReturn:
    """Prints the message and ends with this exit code."""
    error_console().print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Formats a number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def note(message: str) -> None:
    """Prints a remark to standard error."""
    error_console().print(f"[yellow]note:[/] {escape(message)}", soft_wrap=True)


def print_json(data: Any) -> None:
    """Prints one plain JSON object, with lists of numbers on one line."""
    from sequoia_vllm.json_file import dump_json

    typer.echo(dump_json(data), nl=False)


@contextmanager
def engines_print_aside(shown: bool) -> Iterator[None]:
    """Keeps output of engines and their processes away from standard output: ``shown`` on standard
    error at once, or else its end after an error only."""
    global _terminal
    sys.stdout.flush()
    sys.stderr.flush()
    ours = {number: os.dup(number) for number in (1, 2)}
    aside = False
    with ExitStack() as stack:
        kept = stack.enter_context(TemporaryFile())
        with suppress(OSError):  # of streams that are no files
            aside = not shown and sys.stderr.fileno() == 2
        if aside:
            _terminal = stack.enter_context(open(os.dup(2), "w", encoding="utf-8"))  # noqa: PTH123
            os.dup2(kept.fileno(), 2)
        os.dup2(2, 1)
        try:
            with redirect_stdout(sys.stderr):
                yield
        except Exception:
            kept.seek(max(0, kept.seek(0, os.SEEK_END) - _MOST_SHOWN))
            if end := kept.read().decode(errors="replace").strip():
                error_console().print(end, soft_wrap=True, markup=False, highlight=False)
            raise
        finally:
            sys.stderr.flush()
            _terminal = None
            for number, own in ours.items():
                os.dup2(own, number)
                os.close(own)


Report = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

LINE_SECONDS = 30.0


def progress_bar(description: str) -> AbstractContextManager[Report]:
    """Shows progress on standard error: a bar that disappears at the end, or lines."""
    return _bar(description) if error_console().is_terminal else _lines(description)


class ProgressLines:
    """Describes progress and time left in one line; safe to call from any thread. Only steps that
    ended in the present phase predict the time left. A phase begins when the count starts anew, or
    the total changes before a step has ended."""

    def __init__(self, description: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._description = description
        self._clock = clock
        self._start = self._phase_start = self._last = clock()
        self._state = ("starting", 0, 0)

    def report(self, what: str, done: int, total: int) -> None:
        """Notes the present state; see `Report`."""
        _, before, announced = self._state
        if done < before or (done == 0 and total != announced):
            self._phase_start = self._clock()
        if done != before:
            self._last = self._clock()
        self._state = (what, done, total)

    def line(self) -> str:
        """The line: ``profile: batch 4; 1:40 so far, 12 of 48 done, about 5:00 left``."""
        what, done, total = self._state
        now = self._clock()
        parts = [f"{self._description} {what}; {minutes(now - self._start)} so far"]
        if 0 < done < total:
            step = (self._last - self._phase_start) / done
            left = step * (total - done) - min(now - self._last, step)
            parts += [f"{done} of {total} done", f"about {minutes(left)} left"]
        elif total > 1:
            parts.append(f"{done} of {total} done")
        return ", ".join(parts)


def minutes(seconds: float) -> str:
    """Formats seconds as minutes and seconds, like ``1:05``."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


@contextmanager
def _lines(description: str) -> Iterator[Report]:
    """Prints a line every `LINE_SECONDS`, also during a step."""
    lines, ended, errors = ProgressLines(description), threading.Event(), error_console()

    def run() -> None:
        while not ended.wait(LINE_SECONDS):
            errors.print(lines.line(), soft_wrap=True, markup=False, highlight=False)

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield lines.report
    finally:
        ended.set()
        thread.join()


@contextmanager
def _bar(description: str) -> Iterator[Report]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    global _above_bar
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task(description, total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{description} {what}", completed=done, total=total)

        _above_bar = bar.console
        try:
            yield report
        finally:
            _above_bar = None
