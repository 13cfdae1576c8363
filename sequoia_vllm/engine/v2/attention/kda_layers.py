"""Layers of Kimi Delta Attention with trees, those of Kimi Linear.

Imported once a model is loaded: vLLM's decorator asks an option that its configuration sets.
"""

from __future__ import annotations

from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

from sequoia_vllm.engine.v2.attention.mamba_layers import GdnTreeBuilder
from sequoia_vllm.engine.v2.attention.recurrent_layers import RecurrentTreeLayer
from sequoia_vllm.kernels.recurrent_channels import score_kda
from sequoia_vllm.kernels.recurrent_tree import RecurrentHeads


class KdaTreeLayer(RecurrentTreeLayer, KimiGatedDeltaNetAttention):
    """vLLM's layer, with trees."""

    builder = GdnTreeBuilder

    @property
    def shape(self) -> RecurrentHeads:
        """See `RecurrentTreeLayer.shape`."""
        heads, size = self.local_num_heads, self.head_dim
        return RecurrentHeads(heads, heads, size, size, by_channel=True)

    @property
    def unsupported(self) -> str | None:
        """See `RecurrentTreeLayer.unsupported`."""
        if self.cache_config.use_replayssm:
            return f"layer {self.prefix} keeps inputs in place of states (drop --use-replayssm)"
        return super().unsupported

    @eager_break_during_capture
    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        """Computes tree nodes, and calls vLLM's for all other rows."""
        forward = super()._forward
        if (trees := self.trees_of_step()) is None:
            forward(mixed_qkv, g1, g2, beta, core_attn_out)
            return
        rows, nodes = slice(trees.num_rows), core_attn_out[0, : trees.num_rows]
        # vLLM multiplies by weights in float32, where the kernel rounds to the inputs' dtype.
        convolved = self.convolve(mixed_qkv[rows].float(), trees, silu=True).to(mixed_qkv.dtype)
        score_kda(
            convolved, g1[0], beta[0], self.A_log, self.dt_bias, self.gate_lower_bound,
            states=self.kv_cache[1], output=core_attn_out, **self.kept_of(trees),
        )  # fmt: skip
        nodes.copy_(self.o_norm(nodes, g2[rows]))

        def forward_others(
            inputs: Tensor, gates: Tensor, output_gates: Tensor, strengths: Tensor, output: Tensor
        ) -> None:
            forward(inputs, gates[None], output_gates, strengths[None], output[None])

        by_row = mixed_qkv, g1[0], g2, beta[0], core_attn_out[0]
        self.compute_others(trees, forward_others, *by_row)
