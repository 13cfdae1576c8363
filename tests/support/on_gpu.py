"""Processes in which vLLM finds a GPU, and calls of functions there."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests import quick_start
from tests.support.forking import Forker
from tests.support.on_v2 import INTERPRETER, ROOT

STAND_IN = ROOT / "tests" / "gpu_rehearsal" / "stand_in"
# Names a folder with another version of vLLM, see `tests.gpu_rehearsal.other_versions`.
OTHER_VLLM = "SEQUOIA_REHEARSE_VLLM"


def gpu_environment(multiprocessing: bool = False) -> dict[str, str]:
    """This process's environment, changed to a machine with a GPU.

    `multiprocessing`: engines run in processes of their own, as users' do.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    other = [os.environ[OTHER_VLLM]] if OTHER_VLLM in os.environ else []
    path = (quick_start.FOLDER, *other, STAND_IN, INTERPRETER, ROOT)
    return inherited | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRITON_INTERPRET": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
        "OMP_NUM_THREADS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # a library of the GPU build
        # vLLM never does so with `backend="eager"`, but would prepare for it in every pass.
        "VLLM_USE_AOT_COMPILE": "0",
    }


@cache
def _forker() -> Forker:
    return Forker(gpu_environment(), ROOT, "gpu")


def call_on_gpu(
    function: Callable[..., Any], directory: Path, timeout: float = 580, **arguments: Any
) -> Any:
    """What `function(**arguments)` returns in a process that has a GPU (`Forker.call`)."""
    return _forker().call(function, directory, gpu_environment(), timeout, **arguments)
