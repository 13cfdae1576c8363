"""Layers write keys and values into the caches of vLLM's GPU backends so that masks hide NaN."""

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from sequoia_vllm.engine.runner.attention_layers import TreeForward
from sequoia_vllm.kernels.write_cache import write_cache


class WritingForward(TreeForward):
    """Writes of keys and values for one of vLLM's implementations."""

    head_size: int

    # Until: vLLM's kernels write values that are not finite so that masks hide them.
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes like vLLM's kernels, but values that are not finite like `write_cache`."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        by_triton = isinstance(self, TritonAttentionImpl | FlashAttentionDiffKVImpl)
        write_cache(
            key, value, keys, values, slot_mapping, layer._k_scale, layer._v_scale,
            divides_exactly=not by_triton,
        )  # fmt: skip
