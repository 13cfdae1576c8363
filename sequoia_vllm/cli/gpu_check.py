"""``sequoia-vllm gpu-check``: checks whether kernels are right and engines fast on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gpu_check(
    items: Annotated[
        str | None,
        typer.Option(help="What to measure, separated by commas, such as kernels; default: all."),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Folder for results, log and profiles; results in it are not measured again.",
        ),
    ] = Path("gpu-run"),
    minutes: Annotated[
        float, typer.Option(help="Time limit in minutes; nothing that would take longer begins.")
    ] = 30.0,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Smallest sizes; with TRITON_INTERPRET=1 on a CPU, where times mean nothing.",
        ),
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Measure nothing: show this results.jsonl.")
    ] = None,
) -> None:
    """Check every kernel against a reference; time kernels and engines with made-up weights.

    Kernels need PyTorch and Triton alone: `python -m sequoia_vllm.gpu_check --items
    kernels` runs in a bare checkout. Exit code 1: something is wrong; 2: nothing
    could be measured.
    """
    from sequoia_vllm.gpu_check import main

    arguments = ["--output", str(output), "--minutes", str(minutes), *(["--tiny"] if tiny else [])]
    for name, value in (("--items", items), ("--report", report)):
        if value is not None:
            arguments += [name, str(value)]
    raise typer.Exit(main(arguments))
