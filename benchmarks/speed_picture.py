"""Draws speeds that `bench` found, by the number of requests at once (matplotlib, no display).

``python -m benchmarks.speed_picture benchmarks/gpu/h200.jsonl docs/h200.svg``: bars.
``python -m benchmarks.speed_picture benchmarks/speeds/smollm2-epyc-greedy.json
docs/smollm2-epyc.svg``: the lines of ``bench --plot``.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from sequoia_vllm.bench.report import BenchReport, Result, plot_speeds
from sequoia_vllm.cli.common import friendly_errors
from sequoia_vllm.figures import GREY, INK, colour_of, draw_grid, legend_of, new_figure, save_figure

_WIDTH = 0.84  # of a group of bars, where groups are 1 apart


def main(speeds: Path, picture: Path) -> None:
    """Draws the greedy rows of a .jsonl, or a report of `bench`, into a .svg, .png or .pdf."""
    with friendly_errors():
        if speeds.suffix == ".jsonl":
            draw(greedy_cases(speeds), picture)
        else:
            plot_speeds(report_of(speeds), picture)


def report_of(file: Path) -> BenchReport:
    """Reads a report, without figures that only earlier versions kept."""
    found = json.loads(file.read_text(encoding="utf-8"))
    fields = Result.model_fields.keys()
    rows = [{key: row[key] for key in row if key in fields} for row in found["results"]]
    return BenchReport.model_validate({**found, "results": rows})


def greedy_cases(file: Path) -> list[list[dict[str, Any]]]:
    """Each greedy case's results, one for each method."""
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    cases = [each["results"] for each in found if each["what"] == "bench"]
    return [rows for rows in cases if rows[0]["temperature"] == 0]


def draw(cases: list[list[dict[str, Any]]], path: Path) -> None:
    """Draws a group of bars for each case: medians, and the range of rounds."""
    figure, [axes] = new_figure(7.6, 3.2, 1)
    width = _WIDTH / len(cases[0])
    for group, rows in enumerate(cases):
        kinds: Counter[str] = Counter()
        for index, row in enumerate(rows):
            place = group + (index - (len(rows) - 1) / 2) * width
            speed = row["speedup"]
            colour = colour_of(row["kind"], kinds[row["kind"]])
            kinds[row["kind"]] += 1
            axes.bar(
                place, speed["median"], 0.93 * width, color=colour,
                label=legend_of(row["method"]) if group == 0 else None,
            )  # fmt: skip
            axes.vlines(place, speed["low"], speed["high"], color=INK, linewidth=1.2)
            axes.annotate(
                f"{speed['median']:.2f}", (place, speed["high"]), xytext=(0, 4),
                textcoords="offset points", ha="center", fontsize=7.5,
            )  # fmt: skip
    axes.axhline(1, color=GREY, linewidth=0.8)
    counts = [rows[0]["batch_size"] for rows in cases]
    labels = ["1 request" if count == 1 else f"{count} requests at once" for count in counts]
    axes.set_xticks(range(len(cases)), labels=labels)
    axes.margins(y=0.25)
    axes.set_ylim(bottom=0)
    draw_grid(axes, "y")
    axes.set_ylabel("speed over plain vLLM", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=3)
    save_figure(figure, path)


if __name__ == "__main__":
    typer.run(main)
