"""Draws the report of a comparison (matplotlib, no display needed).

``python -m benchmarks.bench_pictures bench.json pictures`` takes what ``sequoia-vllm bench
--output bench.json`` wrote.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sequoia_vllm.bench.methods import BenchError, Kind
from sequoia_vllm.bench.report import BenchReport, Result, shown
from sequoia_vllm.cli.common import friendly_errors
from sequoia_vllm.figures import (
    GREY,
    PALE,
    draw_grid,
    new_figure,
    require_matplotlib,
    save_figure,
    shades,
)
from sequoia_vllm.json_file import read_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = ("target", "draft", "drawing", "verify", "other")


def main() -> None:
    """Draws a report's pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="written by sequoia-vllm bench --output")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    options = parser.parse_args()
    with friendly_errors():
        require_matplotlib()
        report = read_model(options.report, BenchReport, "bench", BenchError)
        for path in plot_report(report, options.folder):
            print(path)


def plot_report(report: BenchReport, folder: Path) -> list[Path]:
    """Draws all pictures of a report.

    Args:
        report: What was measured.
        folder: Where they go; made if it is not there.

    Returns:
        The files: speedup, tokens per step, parts of a step, and, where
        anything was predicted, predicted against measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [
        _bars(report, folder / "speedup.png", "Speedup over plain vLLM", _draw_speedup),
        _bars(report, folder / "tokens_per_step.png", "Tokens per step and request", _draw_tokens),
        _bars(report, folder / "step_time.png", "Time of a step, milliseconds", _draw_parts),
    ]
    if any(result.predicted for result in report.results):
        drawn.append(_draw_predicted(report, folder / "predicted.png"))
    return drawn


Draw = Callable[["Axes", Sequence[Result], Sequence[int]], None]


def _bars(report: BenchReport, path: Path, title: str, draw: Draw) -> Path:
    """Draws a panel for each temperature, with a group of bars for each batch size."""
    temperatures = sorted({result.temperature for result in report.results})
    groups = {t: [r for r in shown(report.results) if r.temperature == t] for t in temperatures}
    rows = max(map(len, groups.values()))
    figure, panels = new_figure(7.5 * len(temperatures), 1.4 + 0.3 * rows, len(temperatures))
    for axes, (temperature, results) in zip(panels, groups.items(), strict=True):
        places = _places(results)
        draw(axes, results, places)
        labels = [f"{result.method}, batch {result.batch_size}" for result in results]
        axes.set_yticks(places, labels=labels)
        axes.invert_yaxis()
        axes.set_title(f"{title}: temperature {temperature:g}", loc="left", fontsize=10.5)
        draw_grid(axes, "x")
    return _save(figure, report, path)


def _places(results: Sequence[Result]) -> list[int]:
    """Gives each result a row, with an empty one between batch sizes."""
    sizes = list(dict.fromkeys(result.batch_size for result in results))
    return [row + sizes.index(result.batch_size) for row, result in enumerate(results)]


def _draw_speedup(axes: Axes, results: Sequence[Result], places: Sequence[int]) -> None:
    middle = [result.speedup.median for result in results]
    below = [result.speedup.median - result.speedup.low for result in results]
    above = [result.speedup.high - result.speedup.median for result in results]
    axes.barh(
        places, middle, xerr=[below, above], color=[_colour(result) for result in results],
        error_kw={"ecolor": GREY, "elinewidth": 1},
    )  # fmt: skip
    axes.axvline(1, color=GREY, linewidth=0.8)
    _name_values(axes, [result.speedup.high for result in results], places,
                 [f"{value:.2f}x" for value in middle])  # fmt: skip


def _draw_tokens(axes: Axes, results: Sequence[Result], places: Sequence[int]) -> None:
    values = [result.tokens_per_step for result in results]
    axes.barh(places, values, color=[_colour(result) for result in results])
    _name_values(axes, values, places, [f"{value:.2f}" for value in values])


def _draw_parts(axes: Axes, results: Sequence[Result], places: Sequence[int]) -> None:
    left = [0.0] * len(results)
    for part, colour in zip(_PARTS, (*reversed(shades(len(_PARTS) - 1)), PALE), strict=True):
        widths = [1e3 * max(0.0, getattr(result.split, part)) for result in results]
        axes.barh(places, widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _name_values(axes, left, places, [f"{1e3 * result.step_seconds:.1f}" for result in results])
    axes.legend(frameon=False, fontsize=8.5, ncols=len(_PARTS), loc="upper right",
                bbox_to_anchor=(1, -0.08))  # fmt: skip


def _draw_predicted(report: BenchReport, path: Path) -> Path:
    figure, (axes,) = new_figure(6.0, 5.4, 1)
    pairs = [(result, result.predicted) for result in report.results if result.predicted]
    for result, predicted in pairs:
        axes.errorbar(
            predicted.speedup, result.speedup.median,
            yerr=[[result.speedup.median - result.speedup.low],
                  [result.speedup.high - result.speedup.median]],
            fmt="o", color=_colour(result), ecolor=GREY, elinewidth=1,
        )  # fmt: skip
        axes.annotate(
            f"{result.method}, batch {result.batch_size}, T={result.temperature:g}",
            (predicted.speedup, result.speedup.median), xytext=(6, -3),
            textcoords="offset points", fontsize=7.5, color=GREY,
        )  # fmt: skip
    ends = [value for result, predicted in pairs
            for value in (predicted.speedup, result.speedup.low, result.speedup.high)]  # fmt: skip
    low, high = 0.9 * min(ends), 1.1 * max(ends)
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("speedup that the cost model predicts")
    axes.set_ylabel("speedup measured")
    return _save(figure, report, path)


def _name_values(
    axes: Axes, ends: Sequence[float], places: Sequence[int], labels: Sequence[str]
) -> None:
    for end, place, label in zip(ends, places, labels, strict=True):
        axes.annotate(label, (end, place), xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=8.5)  # fmt: skip
    axes.margins(x=0.12)


def _colour(result: Result) -> str:
    chain, sequoia, _ = shades(3)
    return {Kind.PLAIN: PALE, Kind.CHAIN: chain, Kind.SEQUOIA: sequoia}[result.kind]


def _save(figure: Figure, report: BenchReport, path: Path) -> Path:
    """Writes the picture, with the pair below it, and whether the target is synthetic."""
    said = f"{report.target.name} with {report.draft.name}, {report.dtype}, {report.device}"
    if report.target.grown_from:
        said += "; the target is synthetic"
    figure.supxlabel(said, fontsize=7.5, color=GREY)
    save_figure(figure, path)
    return path


if __name__ == "__main__":
    main()
