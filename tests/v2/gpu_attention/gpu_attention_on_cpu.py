"""Test only: engines on this CPU take TRITON_ATTN, and trees what they have on GPUs.

Triton's interpreter runs all of it: vLLM's attention and cache update, our tree
attention and our commit, on caches in the layout of GPUs.
"""

from typing import Any


def register() -> None:
    """Applies the changes; may run more than once, as vLLM's plugins do."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from sequoia_vllm.engine.v2 import runner_cpu
    from sequoia_vllm.engine.v2.attention.backend_gpu import GPUTreeBackend

    def get_attn_backend_cls(cls: Any, *args: Any, **kwargs: Any) -> str:
        return AttentionBackendEnum.TRITON_ATTN.get_path()

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    # vLLM's cache update asks for it, to choose its block sizes.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    # No splits of contexts: sixteen times fewer programs to interpret.
    triton_attn.MIN_LAUNCH_GRID_SIZE_2D = 0
    runner_cpu.SequoiaCPUModelRunnerV2.backend_class = GPUTreeBackend
