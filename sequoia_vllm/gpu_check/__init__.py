"""Starts the GPU program of a checkout, ``benchmarks/gpu``: are kernels right, are engines fast?

Its kernels' check needs PyTorch and Triton alone, so nothing else may be imported here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]
_CANNOT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        arguments: Command line; None: the process's own.

    Returns:
        Exit code: 0, 1 if something is wrong, 2 if nothing can be measured.
    """
    if not (_CHECKOUT / "benchmarks" / "gpu").is_dir():
        print(
            "error: the GPU check is not part of the installed package: clone the repository, and "
            "run `python -m sequoia_vllm.gpu_check` in the checkout",
            file=sys.stderr,
        )
        return _CANNOT
    sys.path.insert(0, str(_CHECKOUT))
    code: int = importlib.import_module("benchmarks.gpu.command").main(arguments)
    return code
