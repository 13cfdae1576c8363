"""Processes with interpreted kernels: Model Runner V2 on this CPU, and where vLLM finds a GPU.

Triton reads TRITON_INTERPRET when it is imported, and the V1 tests must see
vLLM as it is installed, so everything on V2 runs in a process of its own.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.calling import DEADLINE, Forker, environment_with
from tests.support.serving import ROOT

INTERPRETER = ROOT / "tests" / "v2" / "interpreter"
GPU_ATTENTION = ROOT / "tests" / "v2" / "gpu_attention"
STAND_IN = ROOT / "tests" / "gpu_rehearsal" / "stand_in"
# Names a folder with another version of vLLM, see `tests.gpu_rehearsal.other_versions`.
OTHER_VLLM = "SEQUOIA_REHEARSE_VLLM"


def v2_environment(gpu_attention: bool = False) -> dict[str, str]:
    """This process's environment, changed to vLLM's V2 runner with interpreted kernels.

    `gpu_attention`: and to the attention, cache layout and commit of GPUs.
    """
    folders = INTERPRETER, *[GPU_ATTENTION] * gpu_attention
    return environment_with(*folders, TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")


def gpu_environment(multiprocessing: bool = False) -> dict[str, str]:
    """This process's environment, changed to a machine with a GPU.

    `multiprocessing`: engines run in processes of their own, as users' do.
    """
    other = [os.environ[OTHER_VLLM]] if OTHER_VLLM in os.environ else []
    return environment_with(
        *other, STAND_IN, INTERPRETER, TRITON_INTERPRET="1",
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int(multiprocessing)),
        VLLM_USE_FLASHINFER_SAMPLER="0",  # a library of the GPU build
        # vLLM never does so with `backend="eager"`, but would prepare for it in every pass.
        VLLM_USE_AOT_COMPILE="0",
    )  # fmt: skip


@cache
def _forker(name: str) -> Forker:
    return Forker({"v2": v2_environment, "gpu": gpu_environment}[name](), ROOT, name)


def call_on_v2(
    function: Callable[..., Any],
    directory: Path,
    timeout: float = DEADLINE,
    gpu_attention: bool = False,
    **arguments: Any,
) -> Any:
    """What `function(**arguments)` returns in a process of its own, on V2 (`Forker.call`).

    For `gpu_attention` see `v2_environment`.
    """
    environment = v2_environment(gpu_attention)
    return _forker("v2").call(function, directory, environment, timeout, **arguments)


def call_on_gpu(
    function: Callable[..., Any], directory: Path, timeout: float = DEADLINE, **arguments: Any
) -> Any:
    """What `function(**arguments)` returns in a process that has a GPU (`Forker.call`)."""
    return _forker("gpu").call(function, directory, gpu_environment(), timeout, **arguments)
