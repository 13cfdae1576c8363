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
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from sequoia_vllm.engine.v2 import runner_cpu
    from sequoia_vllm.engine.v2.attention.backend_gpu import GPUTreeBackend

    def get_attn_backend_cls(cls: Any, *args: Any, attn_selector_config: Any, **_: Any) -> str:
        latent = AttentionBackendEnum.TRITON_MLA
        return (
            latent if attn_selector_config.use_mla else AttentionBackendEnum.TRITON_ATTN
        ).get_path()

    checked = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        """What the CPU's latent attention cannot do, the GPU's can."""
        cache, scheduler = config.cache_config, config.scheduler_config
        asked = cache.enable_prefix_caching, scheduler.max_num_batched_tokens
        chunks = scheduler.enable_chunked_prefill
        checked(cls, config)
        cache.enable_prefix_caching, scheduler.max_num_batched_tokens = asked
        scheduler.enable_chunked_prefill = chunks

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    # The CPU's operator for it has no float32.
    TritonMLAImpl.do_kv_cache_update = CPUMLAImpl.do_kv_cache_update

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    # vLLM's cache update asks for it, to choose its block sizes.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    # No splits of contexts: sixteen times fewer programs to interpret.
    triton_attn.MIN_LAUNCH_GRID_SIZE_2D = 0
    runner_cpu.SequoiaCPUModelRunnerV2.backend_class = GPUTreeBackend
