"""How an engine will run, as far as it changes the times of its steps."""

from __future__ import annotations

import os

from vllm.platforms import current_platform

from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.engine.common.cluster import current_versions
from sequoia_vllm.library.start_times import Runs

# Read early: in a process that has run an engine vLLM has bound it to cores, and set variables.
_CORES = len(os.sched_getaffinity(0))
_THREADS = {
    name: os.environ[name]
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    if name in os.environ
}


def how_it_runs(config: SequoiaConfig, enforce_eager: bool) -> Runs:
    """Of an engine that this process starts.

    Args:
        config: Of the draft its quantization counts; the target's is in the target's directory.
        enforce_eager: vLLM's: nothing is compiled.
    """
    runs: dict[str, str | int | bool] = {
        "vllm": current_versions()["vLLM"],
        "eager": bool(enforce_eager),
        "draft_quantization": config.quantization or "",
    }
    if not current_platform.is_cpu():
        return runs
    return {**runs, "cores": _CORES, **_THREADS}
