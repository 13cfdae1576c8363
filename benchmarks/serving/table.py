"""The table: medians over rounds, their spread, and what is faster than what."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import markdown_table
from sequoia_vllm.bench.report import MOST_SPREAD, Spread

Rounds = Mapping[int, Mapping[str, Any]]
"""Results of ``vllm bench serve`` of one variant and load, by round."""

METRICS = {
    "tokens": "output_throughput",
    "ttft": "mean_ttft_ms", "ttft_p99": "p99_ttft_ms",
    "tpot": "mean_tpot_ms", "tpot_p99": "p99_tpot_ms",
    "e2e": "mean_e2el_ms", "e2e_p99": "p99_e2el_ms",
}  # fmt: skip
"""Our name of each figure: its key in the JSON of ``vllm bench serve``."""
_MEANS = {"tokens": "tokens/s", "ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
_COLUMNS = (
    "arrivals", "", "output tokens/s", "TTFT, ms; P99", "TPOT, ms; P99", "E2E, ms; P99",
    "tokens/s and E2E, of plain",
)  # fmt: skip
_SHORT = {"plain": "plain vLLM", "chain": "vLLM's chain of 4", "sequoia": "Sequoia"}
# vLLM's stochastic chain samples wrongly on CPU builds without Triton: vllm-project/vllm#55005.
_NOT_COUNTED = "chain", "T = 1"
_WRONG = "[wrong output](#vllms-chain-on-cpus)"


def make_rows(results: Mapping[tuple[str, str], Rounds]) -> list[dict[str, Any]]:
    """A row per load and variant. Ratios are medians over the rounds that both have, those of E2E
    inverted: above 1 is faster, as for tokens/s."""
    rows = []
    for (load, variant), rounds in results.items():
        row: dict[str, Any] = {"load": load, "variant": variant, "rounds": len(rounds)}
        for name, key in METRICS.items():
            row[name] = Spread.of([result[key] for result in rounds.values()]).to_dict()
        for name in ("tokens", "e2e"):
            speeds = {
                other: _speeds(found, name)
                for (its, other), found in results.items()
                if its == load
            }
            row[f"{name}_of_plain"] = _ratio(speeds[variant], speeds.get("plain", {}))
        rows.append(row)
    return rows


def make_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of docs/benchmarks.md: E2E in seconds, tokens/s, the best in bold."""
    loads: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if (row["variant"], row["load"][-5:]) != _NOT_COUNTED:
            loads.setdefault(row["load"], {})[row["variant"]] = row
    columns = ("arrivals", *_SHORT.values(), "over plain: answers, tokens/s")
    return markdown_table(columns, [_short_cells(*load) for load in loads.items()])


def _short_cells(load: str, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    fastest = min(found.values(), key=lambda row: row["e2e"]["median"])
    most = max(found.values(), key=lambda row: row["tokens"]["median"])
    cells = [load]
    for name in _SHORT:
        if row := found.get(name):
            middle, low, high = (row["e2e"][key] / 1e3 for key in ("median", "low", "high"))
            seconds, tokens = f"{middle:.1f}", f"{row['tokens']['median']:.1f}"
            seconds = f"**{seconds}**" if row is fastest else seconds
            tokens = f"**{tokens}**" if row is most else tokens
            cells.append(f"{seconds} ({low:.1f} to {high:.1f}); {tokens}")
        else:
            cells.append(_WRONG if (name, load[-5:]) == _NOT_COUNTED else "")
    ratios = [found.get("sequoia", {}).get(f"{name}_of_plain") for name in ("e2e", "tokens")]
    return [*cells, ", ".join(f"{ratio:.2f}x" for ratio in ratios if ratio is not None)]


def make_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table, and below it a warning where rounds disagree."""
    lines = markdown_table(_COLUMNS, map(_cells, rows))
    found = [warning for row in rows for warning in _disagreements(row)]
    if found:
        percent = 100 * (MOST_SPREAD - 1)
        lines += f"\n\nRounds disagree by more than {percent:.0f} %: {'; '.join(found)}."
    return lines


def _speeds(rounds: Rounds, name: str) -> dict[int, float]:
    """Each round's figure, inverted for E2E, so that larger is better."""
    values = {number: result[METRICS[name]] for number, result in rounds.items()}
    return {number: value if name == "tokens" else 1 / value for number, value in values.items()}


def _ratio(own: Mapping[int, float], base: Mapping[int, float]) -> float | None:
    """Median of the ratios of each round; None: the two have no round in common."""
    ratios = [own[number] / base[number] for number in own.keys() & base.keys()]
    return median(ratios) if ratios else None


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [row["load"], row["variant"], _with_spread(row["tokens"], 1)]
    for name, digits in (("ttft", 0), ("tpot", 1), ("e2e", 0)):
        highest = row[f"{name}_p99"]["median"]
        cells.append(f"{_with_spread(row[name], digits)}; {highest:.{digits}f}")
    ratios = [row[f"{name}_of_plain"] for name in ("tokens", "e2e")]
    return [*cells, ", ".join("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)]


def _with_spread(value: Mapping[str, float], digits: int) -> str:
    middle, low, high = (f"{value[key]:.{digits}f}" for key in ("median", "low", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"


def _disagreements(row: Mapping[str, Any]) -> list[str]:
    ratios = {title: row[name]["high"] / row[name]["low"] for name, title in _MEANS.items()}
    where = f"{row['variant']}, {row['load']}"
    return [
        f"{where}: {title} by {100 * (ratio - 1):.0f} %"
        for title, ratio in ratios.items()
        if ratio > MOST_SPREAD
    ]
