"""Gated DeltaNet layers with trees."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from sequoia_vllm.engine.v2.attention.recurrent_layers import (
    RecurrentTreeBuilder,
    RecurrentTreeLayer,
)
from sequoia_vllm.kernels.recurrent_heads import score_gdn
from sequoia_vllm.kernels.recurrent_tree import RecurrentHeads


class GdnTreeBuilder(RecurrentTreeBuilder, GDNAttentionMetadataBuilder):
    """The builder of `GdnTreeLayer`."""


class GdnTreeLayer(RecurrentTreeLayer, QwenGatedDeltaNetAttention):
    """vLLM's layer, with trees."""

    builder = GdnTreeBuilder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_fused_gdn_spec_decode = False  # vLLM's kernel for chains

    @property
    def shape(self) -> RecurrentHeads:
        """See `RecurrentTreeLayer.shape`."""
        heads = self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size
        return RecurrentHeads(*heads, self.head_k_dim, self.head_v_dim)

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Computes tree nodes, and calls vLLM's for all other rows."""
        if (trees := self.trees_of_step()) is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        silu = self.activation in ("silu", "swish")
        score_gdn(
            self.convolve(mixed_qkv[: trees.num_rows], trees, silu), a, b, self.A_log,
            self.dt_bias, states=self.kv_cache[1], output=core_attn_out, **self.kept_of(trees),
        )  # fmt: skip
        self.compute_others(trees, super()._forward_core, mixed_qkv, b, a, core_attn_out)
