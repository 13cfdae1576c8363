"""Shows the progress of a long command: a bar on a terminal, else a line every half minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sequoia_vllm.cli.common import error_console

Report = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

LINE_SECONDS = 30.0


@contextmanager
def progress_bar(description: str) -> Iterator[Report]:
    """Shows progress on standard error: a bar that disappears at the end, or lines."""
    if error_console().is_terminal:
        with _bar(description) as report:
            yield report
    else:
        with _lines(ProgressLines(description)) as report:
            yield report


class ProgressLines:
    """Describes progress and time left in one line; safe to call from any thread.

    Only steps that ended in the present phase predict the time left, so it does not grow during
    a step. A phase begins when the count of steps starts anew, or when the total changes before
    any step has ended.
    """

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
def _lines(lines: ProgressLines) -> Iterator[Report]:
    """Prints a line every `LINE_SECONDS`, also during a step."""
    ended = threading.Event()
    errors = error_console()

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
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task(description, total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{description} {what}", completed=done, total=total)

        yield report
