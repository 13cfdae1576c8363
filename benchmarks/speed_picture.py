"""Draws measured speeds by the number of requests at once (matplotlib, no display needed).

``python -m benchmarks.speed_picture benchmarks/speeds/h100.json docs/h100.svg``
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from sequoia_vllm.cli.common import friendly_errors
from sequoia_vllm.figures import GREY, INK, colour_of, draw_grid, new_figure, save_figure

_WIDTH = 0.84  # of a group of bars, where groups are 1 apart


def main() -> None:
    """Draws one file of `benchmarks/speeds`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("speeds", type=Path, help="rounds by temperature and requests at once")
    parser.add_argument("picture", type=Path, help="a .svg, .png or .pdf")
    options = parser.parse_args()
    with friendly_errors():
        draw(json.loads(options.speeds.read_text(encoding="utf-8")), options.picture)


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draws a group of bars for each case.

    Dots are rounds over plain vLLM's round, and bars are medians of them.
    """
    figure, [axes] = new_figure(7.6, 3.2, 1)
    chains = len(measured["methods"]) - 2
    colours = [
        colour_of("plain"), *(colour_of("chain", n) for n in range(chains)), colour_of("sequoia")
    ]  # fmt: skip
    width = _WIDTH / len(measured["methods"])
    for group, row in enumerate(measured["speeds"]):
        for index, ratios in enumerate(speedups(row)):
            place = group + (index - (len(row["rounds"]) - 1) / 2) * width
            name = measured["methods"][index] if group == 0 else None
            axes.bar(place, median(ratios), 0.93 * width, color=colours[index], label=name)
            axes.plot(
                [place] * len(ratios), ratios, linestyle="", marker="o", markersize=3.5, color=INK,
                markeredgecolor="white", markeredgewidth=0.6,
            )  # fmt: skip
            axes.annotate(
                f"{median(ratios):.2f}", (place, max(ratios)), xytext=(0, 4),
                textcoords="offset points", ha="center", fontsize=8,
            )  # fmt: skip
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_xticks(range(len(measured["speeds"])), labels=map(_case, measured["speeds"]))
    axes.margins(y=0.2)
    axes.set_ylim(bottom=0)
    draw_grid(axes, "y")
    axes.set_ylabel("speed over plain vLLM", fontsize=9)
    axes.legend(frameon=False, fontsize=8.5, loc="upper right", ncols=len(measured["methods"]))
    figure.supxlabel(f"{measured['device']}\n{measured['pair']}", fontsize=8, color=GREY)
    save_figure(figure, path)


def speedups(row: dict[str, Any]) -> list[list[float]]:
    """Each method's rounds over plain vLLM's."""
    plain = row["rounds"][0]
    return [[one / base for one, base in zip(found, plain, strict=True)] for found in row["rounds"]]


def _case(row: dict[str, Any]) -> str:
    count, temperature = row["requests"], row["temperature"]
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{count} request{'s' if count > 1 else ''}, {how}"


if __name__ == "__main__":
    main()
