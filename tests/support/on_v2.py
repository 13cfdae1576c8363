"""Model Runner V2 on this CPU: calls functions in a process whose Triton interprets kernels.

Triton reads TRITON_INTERPRET when it is imported, and the V1 tests must see
vLLM as it is installed, so everything on V2 runs in a process of its own.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests import quick_start
from tests.support.forking import Forker

ROOT = Path(__file__).parents[2]
INTERPRETER = ROOT / "tests" / "v2" / "interpreter"
GPU_ATTENTION = ROOT / "tests" / "v2" / "gpu_attention"


def v2_environment(gpu_attention: bool = False) -> dict[str, str]:
    """This process's environment, changed to vLLM's V2 runner with interpreted kernels.

    `gpu_attention`: and to the attention, cache layout and commit of GPUs.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = [quick_start.FOLDER, INTERPRETER, *[GPU_ATTENTION] * gpu_attention, ROOT]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }


@cache
def _forker() -> Forker:
    return Forker(v2_environment(), ROOT, "v2")


def call_on_v2(
    function: Callable[..., Any],
    directory: Path,
    timeout: float = 580,
    gpu_attention: bool = False,
    **arguments: Any,
) -> Any:
    """What `function(**arguments)` returns in a process of its own, on V2 (`Forker.call`).

    For `gpu_attention` see `v2_environment`.
    """
    environment = v2_environment(gpu_attention)
    return _forker().call(function, directory, environment, timeout, **arguments)
