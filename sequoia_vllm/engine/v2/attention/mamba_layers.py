"""Recurrent layers of each kind with trees: Gated DeltaNet, Mamba2 and short convolutions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

from sequoia_vllm.engine.v2.attention.recurrent_layers import (
    RecurrentTreeBuilder,
    RecurrentTreeLayer,
)
from sequoia_vllm.kernels.recurrent_heads import score_gdn, score_mamba
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


class MambaTreeBuilder(RecurrentTreeBuilder, Mamba2AttentionMetadataBuilder):
    """The builder of `MambaTreeLayer`."""


class MambaTreeLayer(RecurrentTreeLayer, MambaMixer2):
    """vLLM's Mamba2 layer, with trees."""

    builder = MambaTreeBuilder

    @property
    def shape(self) -> RecurrentHeads:
        """See `RecurrentTreeLayer.shape`."""
        heads = self.n_groups // self.tp_size, self.num_heads // self.tp_size
        return RecurrentHeads(*heads, self.ssm_state_size, self.head_dim)

    @property
    def unsupported(self) -> str | None:
        """See `RecurrentTreeLayer.unsupported`."""
        if self.use_replayssm:
            return f"layer {self.prefix} keeps inputs in place of states (drop --use-replayssm)"
        if self.mamba_config.enable_stochastic_rounding:
            option = "--enable-mamba-cache-stochastic-rounding"
            return f"layer {self.prefix} rounds its states by chance (drop {option})"
        return super().unsupported

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> Any:
        """Computes tree nodes, and calls vLLM's for all other rows."""
        if (trees := self.trees_of_step()) is None:
            return super().conv_ssm_forward(projected_states, output)
        sizes = [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size]
        _, inputs, dt = projected_states[: trees.num_rows].split(sizes, dim=-1)
        silu = self.activation in ("silu", "swish")
        score_mamba(
            self.convolve(inputs, trees, silu), dt, self.A, self.D, self.dt_bias,
            states=self.kv_cache[1], output=output, **self.kept_of(trees),
        )  # fmt: skip
        self.compute_others(trees, super().conv_ssm_forward, projected_states, output)
        return None


class ConvTreeBuilder(RecurrentTreeBuilder, ShortConvAttentionMetadataBuilder):
    """The builder of `ConvTreeLayer`."""


class ConvTreeLayer(RecurrentTreeLayer, ShortConv):
    """vLLM's short convolution, with trees."""

    builder = ConvTreeBuilder

    @property
    def convolution(self) -> Any:
        """See `RecurrentTreeLayer.convolution`."""
        return self.conv

    def forward_cuda(self, hidden_states: Tensor, output: Tensor) -> Any:
        """Computes tree nodes, and calls vLLM's for all other rows."""
        if (trees := self.trees_of_step()) is None:
            return super().forward_cuda(hidden_states, output)
        projected, _ = self.in_proj(hidden_states[: trees.num_rows])
        before, after, x = projected.chunk(3, dim=-1)
        mixed = after * self.convolve(before * x, trees, silu=False)
        output[: trees.num_rows], _ = self.out_proj(mixed)
        self.compute_others(trees, super().forward_cuda, hidden_states, output)
        return None
