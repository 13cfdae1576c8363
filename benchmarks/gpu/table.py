"""Results as short plain tables: what went wrong first. Standard library only."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.items import MACHINE, Item
from benchmarks.gpu.results import ItemResults, Results

_SPANS = ("step_ms", "target_ms", "sampling_ms", "drafting_ms", "gaps_ms")
_SPAN_NAMES = ("step ms", "target", "verification", "growth", "gaps")
_OF_ARRIVALS = ("rate", "method", "tokens_per_second", "ttft_ms", "tpot_ms", "e2e_ms")
_MOST_KERNELS = 8


def lines_of(results: Results, items: Sequence[Item]) -> list[str]:
    """The tables of these items."""
    machine = results.of(MACHINE.name).parts.get("machine", {})
    lines = [f"{machine.get('device')}, commit {machine.get('commit')}; weights are made up"]
    if machine.get("interpreted"):
        lines.append("interpreted: times mean nothing")
    lines += [f"versions: {machine.get('versions')}", ""]
    rows = [
        (item.name, _state(found), f"{found.seconds:.0f}", item.what)
        for item, found in ((item, results.of(item.name)) for item in items)
    ]
    lines += aligned([("item", "", "s", "what"), *rows])
    for item in items:
        found = results.of(item.name)
        lines += [f"ERROR {item.name}, {part}: {error}" for part, error in found.errors.items()]
    for item in items:
        if item is not MACHINE and results.of(item.name).parts:
            lines += ["", f"{item.name}: {item.what}", *_item(results.of(item.name).parts)]
    return lines


def _state(found: ItemResults) -> str:
    return found.skipped or found.state or ("cut off" if found.has_begun else "not begun")


def _item(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The tables of one item: one for each kind of its parts."""
    if start := parts.get("start"):
        yield f"started in {start['seconds']} s, {start['device_gib']} GiB of the device in use"
        yield from (f"    {line}" for line in start["log"])
    yield from _table(
        ("", "steps", *_SPAN_NAMES, "passes"),
        [
            (name, part["steps"], *_spans(part), part["passes"])
            for name, part in parts.items()
            if "records" in part
        ],
    )
    yield from _table(
        ("", "", "steps", *_SPAN_NAMES),
        [
            (name, kind, times["steps"], *_spans(times))
            for name, part in parts.items()
            for kind, times in _timed(part)
        ],
    )
    yield from _table(
        ("", "tokens/s", "TTFT ms", "TPOT ms", "E2E ms", "steps by drafts, second half"),
        [
            (
                name, part["tokens_per_second"], part["ttft_ms"], part["tpot_ms"], part["e2e_ms"],
                part["steps_by_drafts_of_the_second_half"],
            )
            for name, part in parts.items()
            if "tpot_ms" in part
        ],
    )  # fmt: skip
    if checks := [part for part in parts.values() if "limit" in part]:
        right = sum(check["error"] <= check["limit"] for check in checks)
        yield f"{right} of {len(checks)} checks right"
    yield from _table(
        ("", "ms", "% of bandwidth"),
        [(name, *_alone(part)) for name, part in parts.items() if "spread" in part],
    )
    for name, part in parts.items():
        if "busy_ms" in part:
            yield f"{name}: the device is busy {part['busy_ms']} ms of a step"
            for kernel, ms, calls in part["kernels"][:_MOST_KERNELS]:
                yield f"    {ms:9.4f} ms in {calls:6} calls: {kernel}"
        if "waits" in part:
            yield f"{name}: {part['waits']} waits, {part['compilations']} compilations"
            for kind in ("waits", "compilations"):
                for line, times in part[f"lines of {kind}"]:
                    yield f"    {times} times: {line}"
    yield from _compared(parts.get("bench", {}).get("lines", ()))
    yield from _table(
        ("requests/s", "method", "tokens/s", "TTFT ms", "TPOT ms", "E2E ms"),
        [
            tuple(line[key] for key in _OF_ARRIVALS)
            for line in parts.get("arrivals", {}).get("lines", ())
        ],
    )


def _compared(reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Methods side by side; the fastest chain of those that were tried is marked."""
    rows = [row for report in reports for row in report["results"]]
    chains = dict.fromkeys(row["method"] for row in rows if row["kind"] == "chain")
    if chains:
        yield f"vLLM's chains that were tried: {'; '.join(chains)}"
    yield from _table(
        ("T", "requests", "method", "tokens/s", "of plain", "tokens/step", "step ms", ""),
        [
            (
                f"{row['temperature']:g}", row["batch_size"], row["method"],
                f"{row['tokens_per_second']['median']:.1f}", "{median:.3f}x ({low:.3f} to "
                "{high:.3f})".format(**row["speedup"]), f"{row['tokens_per_step']:.3f}",
                f"{1e3 * row['step_seconds']:.2f}", "best chain" if row["best_chain"] else "",
            )
            for row in rows
        ],
    )  # fmt: skip


def _timed(part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Kinds of steps that are timed within a part, and their times."""
    for kind, times in part.items():
        if isinstance(times, dict) and "step_ms" in times:
            yield kind, times


def _alone(part: Mapping[str, Any]) -> list[str]:
    """A kernel's time; of attention also what it reads at the rate of a large copy."""
    share = 100 * part.get("bandwidth_floor", 0) / part["seconds"]
    return [f"{1e3 * part['seconds']:.4f}", f"{share:.0f}" if share else ""]


def _spans(times: Mapping[str, Any]) -> list[str]:
    return [f"{times[name]:.3f}" for name in _SPANS]


def _table(heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return aligned([heading, *rows]) if rows else []


def aligned(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows with columns of one width each."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    ]
