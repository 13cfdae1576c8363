"""Pictures of trees and of the frontier (matplotlib, no display needed)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.figures import (
    GREY,
    INK,
    PALE,
    check_format,
    draw_grid,
    new_figure,
    save_figure,
    shades,
)
from sequoia_vllm.hardware.choose import TreeSearch
from sequoia_vllm.hardware.step_profile import HOW_TIMED
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.optimize import Frontier
from sequoia_vllm.tree.shapes import independent_sequences
from sequoia_vllm.tree.token_tree import TokenTree, TreeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sequoia_vllm.hardware.step_profile import Profile

Report = Callable[[str, int, int], None]
_SEQUENCES = (1, 4, 16)
_DEPTHS = (2, 4, 8, 16)
_BATCHES = (1, 4, 16, 64)
# Logarithm of the value drawn in the palest colour; below it all look alike.
_FAINTEST = -3.6


def plot_tree(tree: TokenTree, acceptance: Acceptance | None, title: str, path: Path) -> None:
    """Draws the tree, root on top; node colour and area show the node's value.

    Args:
        tree: The tree.
        acceptance: Vector its values are for; None: all nodes alike.
        title: First line of the heading.
        path: File to write; its ending says which format.

    Raises:
        FigureFormatError: If the format is not one of `FORMATS`.
    """
    check_format(path)
    values = np.ones(tree.size) if acceptance is None else tree.values(acceptance)
    x, leaves = _layout(tree)
    y = -tree.depths.astype(np.float64)
    width = min(40.0, max(7.0, 0.17 * leaves + 2))
    figure, [axes] = new_figure(width, max(3.5, 0.62 * (tree.depth + 1) + 1.4))
    _draw_edges(axes, tree, x, y, values)
    shown = np.maximum(values, 10.0**_FAINTEST)
    dots = axes.scatter(
        x, y, s=20 + 150 * np.sqrt(values), c=np.log10(shown), cmap="viridis_r", zorder=3,
        edgecolors="white", linewidths=0.7, vmin=_FAINTEST, vmax=0,
    )  # fmt: skip
    heading = f"size {tree.size} with the root, depth {tree.depth}"
    if acceptance is not None:
        heading += f", {values.sum():.3f} expected tokens per step"
        bar = figure.colorbar(dots, ax=axes, pad=0.01, fraction=0.025, aspect=25)
        bar.set_ticks([-3, -2, -1, 0], labels=["0.001", "0.01", "0.1", "1"])
        bar.set_label("probability of being accepted", color=GREY)
        bar.outline.set_visible(False)
    _headline(axes, title, heading)
    _levels_axis(axes, tree, values if acceptance is not None else None)
    save_figure(figure, path)


def plot_frontier(
    acceptance: Acceptance,
    path: Path,
    max_size: int = 512,
    profile: Profile | None = None,
    report: Report | None = None,
) -> None:
    """Expected tokens against size; with a profile, speedup against size beside it.

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
    _headline(axes, "Expected tokens by tree size", "root and bonus token included")


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
    _headline(axes, "Speedup by tree size, best depth", f"{profile.device} ({how}); dot: best size")


def _layout(tree: TokenTree) -> tuple[NDArray[np.float64], int]:
    """x of every node, ``[size]``: leaves side by side, parents over their first children."""
    x = np.zeros(tree.size)
    leaves = 0
    # Children follow their parents, so that a depth-first walk needs only a stack.
    order, todo = [], [0]
    while todo:
        node = todo.pop()
        order.append(node)
        todo.extend(reversed(tree.children[node]))
        if not tree.children[node]:
            x[node] = leaves
            leaves += 1
    for node in reversed(order):
        children = tree.children[node]
        if children:
            x[node] = (x[children[0]] + x[children[-1]]) / 2
    return x, leaves


def _draw_edges(
    axes: Axes,
    tree: TokenTree,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    values: NDArray[np.float64],
) -> None:
    from matplotlib.collections import LineCollection

    parents = tree.parents_array[1:]
    segments = np.stack(
        [np.stack([x[parents], y[parents]], -1), np.stack([x[1:], y[1:]], -1)], axis=1
    )
    widths = 0.5 + 2.5 * np.sqrt(values[1:])
    axes.add_collection(LineCollection(list(segments), linewidths=widths, colors=PALE))


def _levels_axis(axes: Axes, tree: TokenTree, values: NDArray[np.float64] | None) -> None:
    labels = []
    for depth, nodes in enumerate(tree.levels):
        count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        share = "" if values is None else f", {values[nodes].sum():.2f}"
        labels.append(f"depth {depth}: {count}{share}")
    axes.set_yticks([-float(depth) for depth in range(tree.depth + 1)], labels=labels)
    axes.set_xticks([])
    axes.margins(x=0.02)
    axes.set_ylim(-tree.depth - 0.5, 0.5)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


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


def _headline(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(f"{title}\n", loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.annotate(
        subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points",
        color=GREY, fontsize=9,
    )  # fmt: skip
