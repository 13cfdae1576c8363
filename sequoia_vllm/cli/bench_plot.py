"""Draws the picture of ``sequoia-vllm bench --plot``."""

from __future__ import annotations

from pathlib import Path

from sequoia_vllm.bench.methods import Kind
from sequoia_vllm.bench.report import BenchReport, Result, shown
from sequoia_vllm.figures import GREY, draw_grid, new_figure, save_figure, shades


def plot_speeds(report: BenchReport, path: Path) -> None:
    """Draws tokens per second of a request by batch size, with a panel for each temperature.

    Points are medians of rounds, and bars reach from the lowest to the highest. Only the fastest
    of vLLM's chains at each batch size is shown.
    """
    temperatures = sorted({result.temperature for result in report.results})
    sizes = sorted({result.batch_size for result in report.results})
    figure, panels = new_figure(1.2 + 3.4 * len(temperatures), 3.5, len(temperatures))
    lines: dict[str, list[Result]] = {}
    for result in shown(report.results):
        name = "vLLM's best chain" if result.kind is Kind.CHAIN else result.method
        lines.setdefault(name, []).append(result)
    chain, *trees = shades(max(3, len(lines) - 1))
    colours = {Kind.PLAIN: iter([GREY]), Kind.CHAIN: iter([chain]), Kind.SEQUOIA: iter(trees)}
    for number, (name, results) in enumerate(lines.items()):
        colour, shift = next(colours[results[0].kind]), 0.06 * (number - (len(lines) - 1) / 2)
        for axes, temperature in zip(panels, temperatures, strict=True):
            of_panel = [result for result in results if result.temperature == temperature]
            rates = [(one.tokens_per_second, one.batch_size) for one in of_panel]
            axes.errorbar(
                [sizes.index(one.batch_size) + shift for one in of_panel],
                [rate.median / size for rate, size in rates],
                yerr=[[(rate.median - rate.low) / size for rate, size in rates],
                      [(rate.high - rate.median) / size for rate, size in rates]],
                color=colour, label=name, marker="o", markersize=4, elinewidth=1.2, capsize=3,
            )  # fmt: skip
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes, temperature in zip(panels, temperatures, strict=True):
        title = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xticks(range(len(sizes)), labels=[str(size) for size in sizes])
        axes.set_xlabel("requests at once")
        axes.set_ylim(0, top)
        draw_grid(axes, "y")
    panels[0].set_ylabel("tokens/s of a request")
    panels[-1].legend(frameon=False, fontsize=9.5)
    said = "; synthetic target" if report.target.grown_from else ""
    names = " with ".join(Path(model.name).name for model in (report.target, report.draft))
    figure.supxlabel(f"{names}, {report.dtype}{said}\n{report.device}", fontsize=8, color=GREY)
    save_figure(figure, path)
