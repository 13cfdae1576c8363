"""A tree as a picture: `tree plot`, and what `tune` found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.figures import GREY, INK, PALE, check_format, new_figure, save_figure
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Logarithm of the value drawn in the palest colour; below it all look alike.
_FAINTEST = -3.6


def plot_tree(tree: TokenTree, acceptance: Acceptance | None, title: str, path: Path) -> None:
    """Draws the tree, root on top; node colour and area show its value for this vector (None: all
    alike). Raises FigureFormatError if the format is not one of `FORMATS`."""
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
    axes.set_title(f"{title}\n", loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.annotate(
        heading, (0, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points",
        color=GREY, fontsize=9,
    )  # fmt: skip
    _levels_axis(axes, tree, values if acceptance is not None else None)
    save_figure(figure, path)


def _layout(tree: TokenTree) -> tuple[NDArray[np.float64], int]:
    """x of every node, ``[size]``: leaves side by side, parents over their first children."""
    x = np.zeros(tree.size)
    leaves = 0
    for node in tree.depth_first:
        if not tree.children[node]:
            x[node] = leaves
            leaves += 1
    for node in reversed(tree.depth_first):
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
