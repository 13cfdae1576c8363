"""Layers of Kimi Delta Attention with trees, those of Kimi Linear and Kimi K3.

Imported once such a model is loaded: vLLM's decorator asks an option that its configuration sets.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadataBuilder
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from sequoia_vllm.engine.v2.attention.mamba_layers import GdnTreeBuilder
from sequoia_vllm.engine.v2.attention.recurrent_layers import (
    KdaLayer,
    RecurrentTreeBuilder,
)
from sequoia_vllm.kernels.recurrent_channels import score_kda


class _OwnIndices(KimiK3KDAMetadataBuilder):
    """Finds states itself. The runner finds those of all requests, and we build for some."""

    @property
    def mamba_aligned_state_indices(self) -> Tensor:
        """The states of what `build` gets. Else there is none: the runner asks if there is."""
        return self._indices

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *drafts: Any
    ) -> Any:
        """See vLLM's."""
        batch, mode = common_attn_metadata, self.vllm_config.cache_config.mamba_cache_mode
        self._indices = mamba_get_block_table_tensor(
            batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, mode
        )
        try:
            return super().build(common_prefix_len, batch, *drafts)
        finally:
            del self._indices


class K3TreeBuilder(RecurrentTreeBuilder, _OwnIndices):
    """The builder of `K3TreeLayer`."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class _KdaNodes(KdaLayer):
    """What both classes of vLLM have in common."""

    cache_config: Any
    A_log: Tensor
    dt_bias: Tensor
    gate_lower_bound: float | None
    o_norm: Any

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
        forward = super()._forward  # type: ignore[misc]
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


class KdaTreeLayer(_KdaNodes, KimiGatedDeltaNetAttention):
    """Kimi Linear's layer, with trees."""

    builder = GdnTreeBuilder


class K3TreeLayer(_KdaNodes, KimiK3DeltaAttention):
    """Kimi K3's layer, with trees."""

    builder = K3TreeBuilder
