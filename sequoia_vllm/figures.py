"""One style for all pictures, by matplotlib without a display.

matplotlib is an extra: servers draw nothing.
"""

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sequoia_vllm.errors import SequoiaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
INK, GREY, PALE, GRID = "#222222", "#767676", "#b5b5b5", "#e4e4e4"
_COLOURS = {
    "plain": (PALE, GREY),
    "chain": ("#e9a23b", "#b9651b", "#7a4419"),
    "sequoia": ("#12827c", "#5a4fa3", "#2b3a67"),
}


class FigureError(SequoiaError, ImportError):
    """Raised where pictures cannot be drawn, as matplotlib is missing."""


class FigureFormatError(SequoiaError, ValueError):
    """A picture format that we do not write."""


def check_format(path: Path) -> None:
    """Refuses, before any work is done, a picture whose file's ending is not of `FORMATS`."""
    if path.suffix.lower() not in FORMATS:
        raise FigureFormatError(f"cannot draw to {path}: name a file ending in .svg, .png or .pdf")


def require_matplotlib() -> None:
    """Refuses to draw without matplotlib, and names the fix."""
    if importlib.util.find_spec("matplotlib") is None:
        raise FigureError("pictures need matplotlib: pip install matplotlib")


def new_figure(width: float, height: float, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """An empty figure of this size in inches, and its panels side by side, in our style.
    It refuses to draw without matplotlib, and names the fix."""
    require_matplotlib()
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The same file for the same content: ids in SVG files are otherwise random.
    rcParams["svg.hashsalt"] = "sequoia-vllm"
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in panels:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(colors=INK, labelsize=8.5)
    return figure, panels


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes the picture; its ending says which format."""
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata)


def draw_grid(axes: "Axes", along: Literal["x", "y", "both"]) -> None:
    """Pale lines behind what is drawn, at the ticks of these axes."""
    axes.grid(axis=along, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def colour_of(kind: str, number: int = 0) -> str:
    """The colour of a plain, chain or sequoia method in all pictures; ``number`` counts a kind."""
    return _COLOURS[kind][number % len(_COLOURS[kind])]


_LEGENDS = (
    (r"Sequoia auto", "Sequoia"),
    (r"Sequoia, lookup", "Sequoia without a draft"),
    (r"Sequoia, no retrieval", "Sequoia, by the draft alone"),
    (r"Sequoia (\d+)x(\d+)", r"Sequoia, \1 nodes, \2 deep"),
    (r"n-gram chain of (\d+)", r"vLLM's n-grams, \1 drafts"),
    (r"suffix chain of (\d+)", r"vLLM's suffixes, \1 drafts"),
    (r"chain of (\d+)(?:, probabilistic)?(?:, block)?(.*)", r"vLLM's chain of \1\2"),
)


def legend_of(method: str) -> str:
    """What a legend calls a method of `bench`, for readers who do not know the options."""
    for pattern, words in _LEGENDS:
        if found := re.fullmatch(pattern, method):
            return found.expand(words)
    return method
