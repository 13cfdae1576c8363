"""Draws expected tokens, and speedup, against the size of the best tree (docs/speedup.svg).

python -m benchmarks.frontier shipped --output frontier.svg
python -m benchmarks.frontier shipped --profile h200.json --output speedup.svg
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from sequoia_vllm.cli.common import friendly_errors
from sequoia_vllm.cli.progress import progress_bar
from sequoia_vllm.figures import (
    GREY,
    check_format,
    draw_grid,
    draw_headline,
    new_figure,
    save_figure,
    shades,
)
from sequoia_vllm.hardware.choose import TreeSearch
from sequoia_vllm.hardware.step_profile import HOW_TIMED, Profile
from sequoia_vllm.library.tree_reference import find_vector
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.optimize import Frontier
from sequoia_vllm.tree.token_tree import TokenTree, TreeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Report = Callable[[str, int, int], None]
_SEQUENCES = (1, 4, 16)
_DEPTHS = (2, 4, 8, 16)
_BATCHES = (1, 4, 16, 64)


def frontier(
    acceptance: Annotated[str, typer.Argument(help="A vector: a file, or a library name.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Picture to write: .svg, .png or .pdf.")
    ],
    profile: Annotated[
        Path | None, typer.Option(help="Times of a device and model pair: draws speedup too.")
    ] = None,
    max_size: Annotated[int, typer.Option(help="Largest size of a tree.")] = 512,
) -> None:
    """Draw expected tokens, and with a profile speedup, against the size of the best tree."""
    with friendly_errors():
        times = None if profile is None else Profile.load(profile)
        with progress_bar("frontier") as report:
            plot_frontier(find_vector(acceptance), output, max_size, times, report)


def plot_frontier(
    acceptance: Acceptance,
    path: Path,
    max_size: int = 512,
    profile: Profile | None = None,
    report: Report | None = None,
) -> None:
    """Draws expected tokens against size; with a profile, speedup against size beside it.

    The left picture is the paper's figure 4: optimal trees of several depths,
    chains, and k independent sequences.

    Args:
        acceptance: Vector to optimise for.
        path: File to write.
        max_size: Largest tree, root included.
        profile: Times for the right picture; None: no right picture.
        report: Progress, called with (what, done, all).

    Raises:
        FigureFormatError: If the format is not one of `FORMATS`.
        TreeError: If ``max_size`` is below 8.
    """
    check_format(path)
    if max_size < 8:
        raise TreeError(f"a frontier up to size {max_size} shows nothing: give at least 8")
    deepest = max_size - 1 if max_size <= 64 else 48
    progress = None if report is None else (lambda done, total: report("sizes", done, total))
    frontier = Frontier.of(acceptance, max_size, deepest, progress=progress)
    figure, panels = new_figure(11.5 if profile else 7.0, 4.9, columns=2 if profile else 1)
    _draw_expected(panels[0], frontier)
    if profile is not None:
        _draw_speedup(panels[1], frontier, profile)
    save_figure(figure, path)


def independent_sequences(count: int, size: int) -> TokenTree:
    """Builds ``count`` chains from the root, as long as each other within one node.

    SpecInfer drafts such sequences; one sequence is a chain. Nodes are stored level by level, so
    that every prefix is a tree.

    Args:
        count: Sequences; at most ``size - 1`` of them get a node.
        size: Nodes, root included.

    Raises:
        TreeError: If either is below 1.
    """
    if count < 1 or size < 1:
        raise TreeError(f"{count} sequences in {size} nodes: both must be at least 1")
    parents = [max(0, node - count) for node in range(1, size)]
    return TokenTree((-1, *parents))


def _draw_expected(axes: Axes, frontier: Frontier) -> None:
    best = frontier.expected_tokens
    max_size = len(best) - 1
    sizes = np.arange(2, max_size + 1)
    ends: list[tuple[float, str, str]] = []
    # A depth that is as good as none limited would only hide that curve.
    depths = [
        depth
        for depth in _DEPTHS
        if depth < best.shape[1] and best[-1, depth] < 0.995 * best[-1, -1]
    ]
    for depth, colour in zip((*depths, best.shape[1] - 1), shades(len(depths) + 1), strict=True):
        label = "no limit" if depth == best.shape[1] - 1 else f"depth {depth}"
        axes.plot(sizes, best[2:, depth], color=colour, linewidth=2)
        ends.append((best[-1, depth], f"optimal tree, {label}", colour))
    for count, style in zip(_SEQUENCES, ("-", "--", ":"), strict=True):
        expected = [
            independent_sequences(count, int(size)).expected_tokens(frontier.acceptance)
            for size in _ladder(max_size)
        ]
        axes.plot(_ladder(max_size), expected, color=GREY, linewidth=1.5, linestyle=style)
        label = "chain" if count == 1 else f"{count} sequences"
        ends.append((expected[-1], label, GREY))
    _size_axis(axes, max_size)
    _end_labels(axes, max_size, ends)
    axes.set_ylabel("expected tokens per step")
    draw_headline(axes, "Expected tokens by tree size", "root and bonus token included")


def _draw_speedup(axes: Axes, frontier: Frontier, profile: Profile) -> None:
    search = TreeSearch(frontier, profile)
    ladder = _ladder(min(len(frontier.expected_tokens) - 1, search.cost.max_tokens(1)))
    ends = []
    for batch, colour in zip(_BATCHES, shades(len(_BATCHES)), strict=True):
        speedups = [search.best_of_size(int(size), batch).speedup for size in ladder]
        top = int(np.argmax(speedups))
        axes.plot(ladder, speedups, color=colour, linewidth=2)
        axes.plot(ladder[top], speedups[top], "o", color=colour, markersize=6, zorder=4)
        ends.append((speedups[-1], f"batch {batch}", colour))
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle=":")
    axes.annotate(
        "plain decoding", (ladder[0], 1.0), xytext=(0, -4), textcoords="offset points", va="top",
        color=GREY, fontsize=8,
    )  # fmt: skip
    _size_axis(axes, int(ladder[-1]))
    axes.set_ylim(bottom=0)
    _end_labels(axes, int(ladder[-1]), ends)
    axes.set_ylabel("speedup over plain decoding")
    how = HOW_TIMED[profile.source]
    draw_headline(
        axes, "Speedup by tree size, best depth", f"{profile.device} ({how}); dot: best size"
    )


def _size_axis(axes: Axes, max_size: int) -> None:
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(1, 12) if 2**power <= max_size]
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(2, max_size)
    axes.set_xlabel("nodes of the tree, root included")
    draw_grid(axes, "y")


def _end_labels(axes: Axes, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Names each curve at its right end, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    gap = 0.045 * (high - low)
    placed = -np.inf
    for value, label, colour in sorted(ends):
        placed = max(value, placed + gap)
        axes.annotate(
            label, (x, value), xytext=(x * 1.06, placed), textcoords="data", color=colour,
            fontsize=8.5, va="center", annotation_clip=False,
        )  # fmt: skip


def _ladder(max_size: int) -> NDArray[np.int64]:
    """About 30 sizes, evenly spread over the logarithm."""
    return np.unique(np.round(np.geomspace(2, max_size, 32)).astype(np.int64))


if __name__ == "__main__":
    typer.run(frontier)
