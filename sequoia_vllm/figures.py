"""Figures of matplotlib that need no display. It is an extra: servers draw nothing."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from sequoia_vllm.errors import SequoiaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class FigureError(SequoiaError, ImportError):
    """Nothing can be drawn here."""


def require_matplotlib() -> None:
    """Says how to get matplotlib; for commands that would draw after a long measurement.

    Raises:
        FigureError: If it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise FigureError("pictures need matplotlib: pip install 'sequoia-vllm[plot]'")


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of this size in inches, and its panels side by side.

    Raises:
        FigureError: If matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The same file for the same content: ids in SVG files are otherwise random.
    rcParams["svg.hashsalt"] = "sequoia-vllm"
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])
