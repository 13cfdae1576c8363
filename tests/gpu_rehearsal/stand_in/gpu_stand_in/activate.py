"""vLLM's entry points: which platform this is, and what is replaced in each of its processes."""

import sys
import types

# The GPU build's operators, which the module of vLLM's CUDA platform imports.
GPU_OPERATORS = "vllm._C_stable_libtorch"


def platform() -> str:
    """Before anything of vLLM looks at torch: the CUDA runtime's functions."""
    from gpu_stand_in import flash_attention, runtime

    sys.modules.setdefault(GPU_OPERATORS, types.ModuleType(GPU_OPERATORS))
    runtime.install()
    flash_attention.install()
    return "gpu_stand_in.platform.StandInPlatform"


def general() -> None:
    """Once vLLM can be imported: what of it needs the GPU build's libraries."""
    from gpu_stand_in import vllm_parts

    vllm_parts.install()
