"""``sequoia-vllm gpu-check``: are the kernels right and fast on this GPU?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gpu_check(
    stages: Annotated[
        str, typer.Option(help="Which of kernels, steps and engine, separated by commas.")
    ] = "kernels,steps,engine",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for the report; written after each stage.")
    ] = Path("gpu-check.json"),
    models: Annotated[
        Path | None,
        typer.Option(help="Folder of the pair to make synthetic models of."),
    ] = None,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Smallest sizes; with TRITON_INTERPRET=1 on a CPU, where times mean nothing.",
        ),
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Run nothing: show this report.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write the steps' times as a profile for the tree library.")
    ] = None,
) -> None:
    """Check every kernel against a reference, time kernels, steps and engine, judge the goals.

    The first two stages need PyTorch and Triton alone: `python -m
    sequoia_vllm.gpu_check` runs them in a bare checkout. Exit code 1: something
    is wrong; 2: it could not be checked.
    """
    from sequoia_vllm.gpu_check import main

    arguments = ["--stages", stages, "--output", str(output), *(["--tiny"] if tiny else [])]
    for name, path in (("--models", models), ("--report", report), ("--profile", profile)):
        if path is not None:
            arguments += [name, str(path)]
    raise typer.Exit(main(arguments))
