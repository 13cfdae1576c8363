"""Ling's and Ring's layers with states: linear attention (2.5 and 2.6), Kimi Delta Attention (3).

Imported once such a model is loaded, as `kda_layers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import BailingMoELinearAttention
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
from vllm.v1.attention.backends.linear_attn import (
    BailingLinearAttentionMetadataBuilder,
    LinearAttentionMetadata,
)
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridAttnMetadata

from sequoia_vllm.engine.common.patched import patch_for_good
from sequoia_vllm.engine.v2.attention.mamba_layers import GdnTreeBuilder
from sequoia_vllm.engine.v2.attention.recurrent_layers import (
    KdaLayer,
    RecurrentTreeBuilder,
    RecurrentTreeLayer,
    RecurrentTreeMetadata,
)
from sequoia_vllm.kernels.recurrent_channels import score_kda_by_decays
from sequoia_vllm.kernels.recurrent_heads import score_linear
from sequoia_vllm.kernels.recurrent_tree import RecurrentHeads

_told = MambaHybridAttnMetadata.get_extra_attn_kwargs


class LinearTreeBuilder(RecurrentTreeBuilder, BailingLinearAttentionMetadataBuilder):
    """The builder of `LinearTreeLayer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Until: vLLM's runner tells numbers of drafts to builders of linear attention, too.
        patch_for_good(MambaHybridAttnMetadata, "get_extra_attn_kwargs", _with_drafts)


def _with_drafts(self: Any, builder: Any, num_reqs: int) -> dict[str, Any]:
    """Replaces vLLM's: what a builder is told of a step beside the batch."""
    if not isinstance(builder, LinearTreeBuilder):
        return _told(self, builder, num_reqs)
    drafts = self.num_decode_draft_tokens_cpu
    return {} if drafts is None else {"num_decode_draft_tokens_cpu": drafts[:num_reqs]}


@dataclass
class NodesAsDecodes(LinearAttentionMetadata):
    """Metadata with which vLLM's layer projects nodes and decodes them, by `LinearTreeLayer`."""

    trees: RecurrentTreeMetadata

    @staticmethod
    def of(trees: RecurrentTreeMetadata) -> NodesAsDecodes:
        """The metadata of these trees alone."""
        requests, none = trees.state_indices, trees.state_indices[:0]
        return NodesAsDecodes(0, 0, len(requests), trees.num_rows, none, none, requests, trees)


class LinearTreeLayer(RecurrentTreeLayer, BailingMoELinearAttention):
    """vLLM's linear attention, with trees."""

    builder = LinearTreeBuilder
    channels = 0

    @property
    def shape(self) -> RecurrentHeads:
        """See `RecurrentTreeLayer.shape`."""
        return RecurrentHeads(self.tp_heads, self.tp_heads, self.head_dim, self.head_dim)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Keeps states as our kernels read them; vLLM's, which take strides, see them turned."""
        super().bind_kv_cache(kv_cache)
        [states] = self.kv_cache
        self.kv_cache = (states.transpose(-1, -2),)

    @property
    def states(self) -> tuple[Tensor, ...]:
        """See `RecurrentTreeLayer.states`."""
        return (self.kv_cache[0].transpose(-1, -2),)

    @property
    def last_inputs(self) -> Tensor:
        """None: ``[blocks, 0, 0]``."""
        return self.kv_cache[0][:, :0, :0, 0]

    def _forward(self, hidden_states: Tensor, output: Tensor, positions: Tensor) -> None:
        """Computes tree nodes, and calls vLLM's for all other rows."""
        forward, by_row = super()._forward, (hidden_states, output, positions)
        if (trees := self.trees_of_step()) is None:
            forward(*by_row)
            return
        with self.as_metadata(NodesAsDecodes.of(trees)):
            forward(*(each[: trees.num_rows] for each in by_row))
        self.compute_others(trees, forward, *by_row)

    def _decode_infer(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, state_indices_tensor: Tensor,
        attn_metadata: Any,
    ) -> Tensor:  # fmt: skip
        """Scores tree nodes; vLLM's decodes one token of each request."""
        if not isinstance(attn_metadata, NodesAsDecodes):
            return super()._decode_infer(q, k, v, kv_cache, state_indices_tensor, attn_metadata)
        output, kept = torch.zeros_like(v), self.kept_of(attn_metadata.trees)
        slopes = self.tp_slope.flatten()
        score_linear(q, k, v, slopes, states=self.states[0], output=output, **kept)
        return output.flatten(1)


class BailingKdaTreeLayer(KdaLayer, BailingMoeV3KimiDeltaAttention):
    """vLLM's Kimi Delta Attention of Ling 3, which has decays and strengths computed before."""

    builder = GdnTreeBuilder

    @property
    def convolution(self) -> Any:
        """Its three convolutions as one; made anew each time, as weights may be loaded again."""
        three = self.q_conv1d, self.k_conv1d, self.v_conv1d
        return SimpleNamespace(weight=torch.cat([each.weight for each in three]), bias=None)

    def _forward(
        self, q_proj_states: Tensor, k_proj_states: Tensor, v_proj_states: Tensor, g1: Tensor,
        beta: Tensor, core_attn_out: Tensor,
    ) -> None:  # fmt: skip
        """Computes tree nodes, and calls vLLM's for all other rows."""
        forward, inputs = super()._forward, (q_proj_states, k_proj_states, v_proj_states)
        if (trees := self.trees_of_step()) is None:
            forward(*inputs, g1, beta, core_attn_out)
            return
        mixed = torch.cat([each[: trees.num_rows] for each in inputs], dim=1)
        # vLLM multiplies by weights in float32, where the kernel rounds to the inputs' dtype.
        convolved = self.convolve(mixed.float(), trees, silu=True).to(mixed.dtype)
        score_kda_by_decays(
            convolved, g1[0], beta[0], self.lower_bound if self.safe_gate else None,
            states=self.kv_cache[1], output=core_attn_out, **self.kept_of(trees),
        )  # fmt: skip

        def forward_others(*rows: Tensor) -> None:
            *of_inputs, decays, strengths, output = rows
            forward(*of_inputs, decays[None], strengths[None], output[None])

        self.compute_others(trees, forward_others, *inputs, g1[0], beta[0], core_attn_out[0])
