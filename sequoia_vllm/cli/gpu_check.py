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
        str | None, typer.Option(help="What to measure, like kernels,engine; default: all.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder for results; those in it stay."),
    ] = Path("gpu-run"),
    minutes: Annotated[
        float, typer.Option(help="Time limit in minutes; nothing that would take longer begins.")
    ] = 30.0,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Smallest sizes; on a CPU with TRITON_INTERPRET=1.")
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
    if (checkout := find_checkout()) is None:
        fail(
            "the GPU check is not part of the installed package: run this command in a "
            "checkout of the repository"
        )
    given = {"--output": output, "--minutes": minutes, "--items": items, "--report": report}
    options = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    # A new program, so that all of it is the checkout's, and nothing of an installed package.
    path = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    options += ["--tiny"] if tiny else []
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", *options]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": os.pathsep.join(path)})
