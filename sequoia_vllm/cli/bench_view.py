"""A comparison as tables."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from sequoia_vllm.cli.common import console, note

if TYPE_CHECKING:
    from rich.console import Console

    from sequoia_vllm.bench.report import BenchReport, GreedyCheck, Mismatch, Result, SearchedChain


def print_report(report: BenchReport) -> None:
    """Speeds, time splits, the greedy check, and everything that must be said beside them."""
    out = console()
    out.print(
        f"{report.target.name} with {report.draft.name}, {report.dtype}, on {report.device}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    _print_speeds(out, report.results)
    if report.searched is not None:
        _print_search(out, report.searched)
    _print_splits(out, report.results)
    if report.greedy is not None:
        _print_greedy(out, report.greedy)
    said = [result.note for result in report.results if result.note]
    for line in dict.fromkeys([*report.notes, *said]):
        note(line)


def _print_speeds(out: Console, results: list[Result]) -> None:
    predicted = any(result.predicted for result in results)
    table = Table(
        title="Speed of decoding: medians of rounds (lowest–highest)",
        caption="+ vLLM's best chain here; * see the notes", box=None, pad_edge=False,
        header_style="bold",
    )  # fmt: skip
    for column in ("T", "batch"):
        table.add_column(column, justify="right")
    table.add_column("method")
    numbers = ["tokens/s", "speed", "tokens per step", "step ms"]
    for column in [*numbers, *(["predicted", "measured/predicted"] if predicted else [])]:
        table.add_column(column, justify="right")
    for _, group in groupby(results, key=lambda result: (result.temperature, result.batch_size)):
        for number, result in enumerate(group):
            case = ("", "") if number else (f"{result.temperature:g}", str(result.batch_size))
            cells = _prediction(result) if predicted else ()
            table.add_row(*case, *_speed_cells(result), *cells)
        table.add_section()
    out.print(table)


def _speed_cells(result: Result) -> tuple[str, ...]:
    speedup = result.speedup
    marks = (" +" if result.best_chain else "") + (" *" if result.note else "")
    return (
        escape(result.method) + marks,
        f"{result.tokens_per_second.median:.1f}",
        f"{speedup.median:.2f}x ({speedup.low:.2f}–{speedup.high:.2f})",
        f"{result.tokens_per_step:.2f}",
        f"{1e3 * result.step_seconds:.2f}",
    )


def _prediction(result: Result) -> tuple[str, str]:
    if result.predicted is None or result.measured_over_predicted is None:
        return "not predicted" if result.kind == "sequoia" else "", ""
    mark = " (extrapolated)" if result.predicted.extrapolated else ""
    return f"{result.predicted.speedup:.2f}x{mark}", f"{result.measured_over_predicted:.2f}"


def _print_search(out: Console, searched: list[SearchedChain]) -> None:
    lengths = sorted({one.drafts for one in searched})
    table = Table(
        title="The search for vLLM's best chain: predicted tokens/s",
        caption="by drafts; predicted from a chain of "
        f"{lengths[-1]}, only to choose: those in brackets were run, and are measured above",
        box=None, pad_edge=False, header_style="bold",
    )  # fmt: skip
    for column in ("T", "batch"):
        table.add_column(column, justify="right")
    table.add_column("sampling")
    for length in lengths:
        table.add_column(str(length), justify="right")
    for (temperature, batch, words), group in groupby(
        searched, key=lambda one: (one.temperature, one.batch_size, one.sampling)
    ):
        cells = [
            f"({one.tokens_per_second:.1f})" if one.run else f"{one.tokens_per_second:.1f}"
            for one in group
        ]
        sampling = ", ".join(words) or "vLLM's default"
        table.add_row(f"{temperature:g}", str(batch), sampling, *cells)
    out.print(table)


def _print_splits(out: Console, results: list[Result]) -> None:
    table = Table(
        title="A step's time, milliseconds", box=None, pad_edge=False, header_style="bold"
    )
    for column in ("T", "batch"):
        table.add_column(column, justify="right")
    table.add_column("method")
    for column in ("target", "draft", "drawing", "verify", "other", "outside models"):
        table.add_column(column, justify="right")
    for result in results:
        parts = result.split
        table.add_row(
            f"{result.temperature:g}", str(result.batch_size), escape(result.method),
            *(f"{1e3 * part:.2f}" for part in
              (parts.target, parts.draft, parts.drawing, parts.verify, parts.other)),
            f"{parts.outside / result.step_seconds:.1%}",
        )  # fmt: skip
    out.print(table)


def _print_greedy(out: Console, check: GreedyCheck) -> None:
    out.print(f"Greedy output identical to plain vLLM's: {check.identical} of {check.compared}")
    for mismatch in check.mismatches:
        verdict = f"a near-tie (within {check.bound} nats)" if mismatch.near_tie else "an error"
        out.print(f"  {describe(mismatch)}: {verdict}", highlight=False, soft_wrap=True)


def describe(mismatch: Mismatch) -> str:
    """A mismatch in words."""
    gap = "" if mismatch.gap is None else f", up to {mismatch.gap:.3g} nats below the best"
    return (
        f"{mismatch.method}, batch {mismatch.batch_size}, prompt {mismatch.prompt + 1}: differs "
        f"after {mismatch.position} tokens ({mismatch.token}, not {mismatch.plain_token}){gap}"
    )
