"""vLLM's entry points: which platform this is, and what is replaced in each of its processes."""


def platform() -> str:
    """Before anything of vLLM looks at torch: the CUDA runtime's functions."""
    from gpu_stand_in import runtime

    runtime.install()
    return "gpu_stand_in.platform.StandInPlatform"


def general() -> None:
    """Once vLLM can be imported: what of it needs the GPU build's libraries."""
    from gpu_stand_in import vllm_parts

    vllm_parts.install()
