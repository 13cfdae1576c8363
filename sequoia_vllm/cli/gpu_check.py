"""``sequoia-vllm gpu-check``: checks whether kernels are right and engines fast on this GPU."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from sequoia_vllm.checkout import find_checkout
from sequoia_vllm.cli.common import fail


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

    It runs from a checkout. Kernels need PyTorch and Triton alone: `python -m benchmarks.gpu
    --items kernels` runs there without an installation. Exit code 1: something is wrong; 2:
    nothing could be measured.
    """
    checkout = find_checkout()
    if checkout is None:
        fail(
            "the GPU check is not part of the installed package: clone the repository, and run "
            "this command in the checkout"
        )
    arguments = ["--output", str(output), "--minutes", str(minutes), *(["--tiny"] if tiny else [])]
    for name, value in (("--items", items), ("--report", report)):
        if value is not None:
            arguments += [name, str(value)]
    # A new program, so that all of it is the checkout's, and nothing of an installed package.
    path = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", *arguments]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": os.pathsep.join(path)})
