"""Draws measured speeds by the number of requests at once (matplotlib, no display needed).

``python -m benchmarks.speed_picture benchmarks/speeds/h100.json docs/h100.svg``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from sequoia_vllm.cli.common import friendly_errors
from sequoia_vllm.figures import GREY, INK, PALE, draw_grid, new_figure, save_figure, shades

_WIDTH = 0.26  # of a bar, where groups are 1 apart


def main() -> None:
    """Draws one file of `benchmarks/speeds`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("speeds", type=Path, help="rounds by temperature and requests at once")
    parser.add_argument("picture", type=Path, help="a .svg, .png or .pdf")
    options = parser.parse_args()
    with friendly_errors():
        draw(json.loads(options.speeds.read_text(encoding="utf-8")), options.picture)


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draws a panel for each temperature.

    Bars are means over plain vLLM's mean. Dots are single rounds over it.
    """
    temperatures = sorted({row["temperature"] for row in measured["speeds"]})
    figure, panels = new_figure(7.6, 3.0, len(temperatures))
    chain, sequoia, _ = shades(3)  # as in the pictures of `bench`
    colours = (PALE, chain, sequoia)
    most = max(
        speed / fmean(row["rounds"][0])
        for row in measured["speeds"] for rounds in row["rounds"] for speed in rounds
    )  # fmt: skip
    for axes, temperature in zip(panels, temperatures, strict=True):
        rows = [row for row in measured["speeds"] if row["temperature"] == temperature]
        for group, row in enumerate(rows):
            plain = fmean(row["rounds"][0])
            for index, rounds in enumerate(row["rounds"]):
                place = group + (index - 1) * (_WIDTH + 0.02)
                name = measured["methods"][index] if group == 0 else None
                axes.bar(place, fmean(rounds) / plain, _WIDTH, color=colours[index], label=name)
                axes.plot(
                    [place] * len(rounds), [speed / plain for speed in rounds],
                    linestyle="", marker="o", markersize=2.5, color=INK,
                )  # fmt: skip
                axes.annotate(
                    f"{fmean(rounds) / plain:.2f}", (place, max(rounds) / plain), xytext=(0, 4),
                    textcoords="offset points", ha="center", fontsize=8.5,
                )  # fmt: skip
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.set_xticks(range(len(rows)), labels=[str(row["requests"]) for row in rows])
        axes.set_xlabel("requests at once", fontsize=9)
        axes.set_title(
            "greedy" if temperature == 0 else f"temperature {temperature:g}",
            loc="left",
            fontsize=10,
        )
        axes.set_ylim(0, 1.2 * most)
        draw_grid(axes, "y")
    panels[0].set_ylabel("speed over plain vLLM", fontsize=9)
    panels[-1].legend(frameon=False, fontsize=8.5, loc="upper right")
    figure.supxlabel(f"{measured['device']}; {measured['pair']}", fontsize=8, color=GREY)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
