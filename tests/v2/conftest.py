"""Model Runner V2 on this CPU: calls functions in a process whose Triton interprets kernels.

Triton reads TRITON_INTERPRET when it is imported, and the V1 tests must see
vLLM as it is installed, so everything on V2 runs in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INTERPRETER = Path(__file__).parent / "interpreter"
GPU_ATTENTION = Path(__file__).parent / "gpu_attention"

CHILD = """
import importlib, json, sys
module, name, arguments, result = sys.argv[1:]
answer = getattr(importlib.import_module(module), name)(**json.loads(arguments))
with open(result, "w") as file:
    json.dump(answer, file)
"""


def v2_environment(gpu_attention: bool = False) -> dict[str, str]:
    """This process's environment, changed to vLLM's V2 runner with interpreted kernels.

    `gpu_attention`: and to the attention, cache layout and commit of GPUs.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = [INTERPRETER, *[GPU_ATTENTION] * gpu_attention, ROOT]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }


def call_on_v2(
    function: Callable[..., Any],
    directory: Path,
    timeout: float = 580,
    gpu_attention: bool = False,
    **arguments: Any,
) -> Any:
    """What `function(**arguments)` returns in a process of its own, on V2.

    The function is imported there by its module and name, so it stands at the
    top of a module; arguments and result are what JSON can hold. `directory`
    takes the result file; for `gpu_attention` see `v2_environment`. Raises
    AssertionError, with the end of the process's output, when it fails;
    subprocess.TimeoutExpired after `timeout` seconds.
    """
    result = directory / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-c", CHILD, function.__module__, function.__name__]
    process = subprocess.run(
        [*command, json.dumps(arguments), str(result)],
        cwd=ROOT,
        env=v2_environment(gpu_attention),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if process.returncode:
        raise AssertionError(f"{function.__name__} failed on V2:\n{process.stdout[-8000:]}")
    return json.loads(result.read_text())
