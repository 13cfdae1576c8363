"""Layers whose keys have more channels than their values (MiMo-V2): vLLM's backends, with trees.

Their cache has a key and its value side by side, as that of other layers has.
"""

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn_diffkv import (
    FlashAttentionDiffKVBackend,
    FlashAttentionDiffKVImpl,
)
from vllm.v1.attention.backends.triton_attn_diffkv import (
    TritonAttentionDiffKVBackend,
    TritonAttentionDiffKVImpl,
    TritonAttentionDiffKVMetadataBuilder,
)

from sequoia_vllm.engine.v2.attention.attention_gpu import FlashTreeBuilder, GPUTreeForward


class FlashDiffKVTreeImpl(GPUTreeForward, FlashAttentionDiffKVImpl):
    """FlashAttention for keys and values of two sizes, with trees; ours reads their contexts."""

    value_size = property(lambda self: FlashAttentionDiffKVBackend.head_size_v)


class TritonDiffKVTreeImpl(GPUTreeForward, TritonAttentionDiffKVImpl):
    """vLLM's Triton attention for keys and values of two sizes, with trees."""

    value_size = property(lambda self: TritonAttentionDiffKVBackend.head_size_v)


class TritonDiffKVTreeBuilder(TritonAttentionDiffKVMetadataBuilder):
    """Builds vLLM's metadata; a full CUDA graph holds either trees or one token per request."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class FlashDiffKVTreeBackend(FlashAttentionDiffKVBackend):
    """Registered for FLASH_ATTN_DIFFKV in the workers of a Sequoia engine only."""

    supports_kv_cache_update_bypass = False

    # vLLM's implementation asks vLLM's class.
    set_head_size_v = staticmethod(FlashAttentionDiffKVBackend.set_head_size_v)
    get_impl_cls = staticmethod(lambda: FlashDiffKVTreeImpl)
    get_builder_cls = staticmethod(lambda: FlashTreeBuilder)


class TritonDiffKVTreeBackend(TritonAttentionDiffKVBackend):
    """Registered for TRITON_ATTN_DIFFKV in the workers of a Sequoia engine only."""

    supports_kv_cache_update_bypass = False

    set_head_size_v = staticmethod(TritonAttentionDiffKVBackend.set_head_size_v)
    get_impl_cls = staticmethod(lambda: TritonDiffKVTreeImpl)
    get_builder_cls = staticmethod(lambda: TritonDiffKVTreeBuilder)
