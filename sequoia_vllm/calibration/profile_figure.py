"""The picture of a profile: how the time of a target pass grows with its tokens."""

from __future__ import annotations

from pathlib import Path

from sequoia_vllm.figures import check_format, draw_grid, new_figure, save_figure, shades
from sequoia_vllm.hardware.step_profile import Curve, Profile


def plot_profile(profile: Profile, path: Path) -> None:
    """Draws t(n)/t(1) of the target and of the draft, by batch size and context.

    Args:
        profile: Times of a device and model pair.
        path: File to write; its ending says which format.

    Raises:
        FigureFormatError: If the format is not one that we write.
    """
    check_format(path)
    figure, panels = new_figure(10, 4.4, columns=2)
    from matplotlib.ticker import StrMethodFormatter

    curves = (profile.target_forward, profile.draft_level)
    names = ("target: t(n) / t(1)", "one draft level / t(1)")
    plain = {_place(curve): curve.seconds[0] for curve in profile.target_forward}
    for axes, part, name in zip(panels, curves, names, strict=True):
        for curve, colour in zip(sorted(part, key=_place), shades(len(part)), strict=True):
            ratios = [seconds / plain[_place(curve)] for seconds in curve.seconds]
            axes.plot(
                curve.tokens, ratios, color=colour, marker="o", markersize=3, label=_label(curve)
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_xlabel("tokens per request")
        axes.set_ylim(bottom=0)
        draw_grid(axes, "both")
        axes.set_title(name, loc="left", fontsize=10)
    panels[0].legend(fontsize=7, frameon=False)
    figure.suptitle(
        f"{Path(profile.target).name} with {Path(profile.draft).name} on {profile.device}, "
        f"{profile.dtype} ({profile.source})",
        fontsize=10,
    )
    save_figure(figure, path)


def _place(curve: Curve) -> tuple[int, int]:
    return curve.batch_size, curve.context_length


def _label(curve: Curve) -> str:
    return f"batch {curve.batch_size}, context {curve.context_length}"
