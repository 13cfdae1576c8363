"""``python -m benchmarks.synthetic_target``: writes a synthetic target."""

import re
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.synthetic_target.write import Dtype, write_synthetic_target
from sequoia_vllm.cli.common import console, fail, friendly_errors, progress_bar

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}


@app.command()
def synthetic_target(
    source: Annotated[
        str, typer.Argument(help="Small trained model: a folder, or a name on the Hub.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where the synthetic target goes.")],
    params: Annotated[
        str | None,
        typer.Option(help='Parameters it shall have, like "800M" or "7B"; met within 2 %.'),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers in all, instead of --params.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="MLP width (intermediate_size), likewise.")
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(min=1, help="Hidden size, a multiple of the source's; heads grow as much."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of its weights; auto: the source's.")] = "auto",
) -> None:
    """Write a larger model that computes exactly what a small trained one does.

    Added layers and MLP columns cost their full compute and memory traffic and
    change no logit. So realistic sizes can be timed, with realistic acceptance,
    where no trained large pair is at hand. Its config.json says what it is.
    """
    if params is not None and (layers is not None or width is not None):
        fail("--params chooses layers and width: leave out --layers and --width")
    if params is layers is width is hidden is None:
        fail("give --params, or some of --layers, --width and --hidden")
    count = None
    if params is not None:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBG]?)", params.strip().upper())
        if found is None:
            fail(f"--params {params!r}: give a number like 800M or 1.5B")
        count = float(found[1]) * _UNITS[found[2]]
    with friendly_errors(), progress_bar("synthetic target:") as report:
        made = write_synthetic_target(
            source, folder, parameters=count, layers=layers, width=width, hidden=hidden,
            dtype=dtype, report=report,
        )  # fmt: skip
    shape, own = made.shape, made.source
    console().print(
        f"{made.folder}: {shape.parameters / 1e6:,.1f}M parameters in {made.dtype}, "
        f"{shape.layers} layers of hidden size {shape.hidden} and MLP width {shape.width} "
        f"(from {own.parameters(own.layers, own.width) / 1e6:,.1f}M, {own.layers} layers of "
        f"{own.hidden} and {own.width})",
        soft_wrap=True,
    )


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.synthetic_target")
