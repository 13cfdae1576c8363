"""Gated DeltaNet layers with trees: vLLM's own, except for the rows of tree nodes.

Steps without drafts are vLLM's, and so are rows of prompts and of requests without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec

from sequoia_vllm.kernels.gdn_tree import (
    NEVER,
    GdnShape,
    KeptNodes,
    ScoredNodes,
    convolve_nodes,
    score_nodes,
)


@dataclass
class GdnTreeMetadata:
    """What a layer needs in a step with trees, whose rows come first.

    Attributes:
        state_indices: int32 ``[R]``: block of each tree's state; 0: a CUDA graph's padding.
        block_table: int32 ``[R, columns]``: all state blocks of a request.
        block_size: Tokens after which vLLM keeps a state for others; `NEVER`: it keeps none.
        num_rows: Rows of tree nodes.
        others: vLLM's metadata, as if the batch had only the requests without trees; None: it has
            no others.
        tree: The nodes; the runner sets it.
    """

    state_indices: Tensor
    block_table: Tensor
    block_size: int
    num_rows: int
    others: GDNAttentionMetadata | None = None
    tree: ScoredNodes | None = None


class GdnTreeBuilder(GDNAttentionMetadataBuilder):
    """Builds vLLM's metadata of an engine without speculation, and ours for trees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec, self.use_spec_decode = 0, False
        requests = self.vllm_config.scheduler_config.max_num_seqs
        # Stays in place: CUDA graphs read it.
        self._state_indices = torch.zeros(requests, dtype=torch.int32, device=self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> GDNAttentionMetadata | GdnTreeMetadata:
        """Calls vLLM's for all requests without drafts; those with drafts precede them."""
        batch, drafts = common_attn_metadata, num_decode_draft_tokens_cpu
        trees = 0 if drafts is None else int((drafts > 0).sum())
        if trees == 0:
            return super().build(common_prefix_len, batch)
        mode = self.vllm_config.cache_config.mamba_cache_mode
        blocks = mamba_get_block_table_tensor(
            batch.block_table_tensor, batch.seq_lens, self.kv_cache_spec, mode
        )
        self._state_indices[:trees].copy_(blocks[:trees, 0])
        self._state_indices[trees:].fill_(0)
        rows, end = batch.query_start_loc_cpu[[trees, -1]].tolist()
        return GdnTreeMetadata(
            state_indices=self._state_indices[: batch.num_reqs],
            block_table=batch.block_table_tensor,
            block_size=self.kv_cache_spec.block_size if mode == "align" else NEVER,
            num_rows=rows,
            others=super().build(0, _without(batch, trees, rows)) if rows < end else None,
        )


def _without(batch: CommonAttentionMetadata, requests: int, rows: int) -> CommonAttentionMetadata:
    """The batch without its first requests and rows. Views would begin in the middle of memory."""
    starts = batch.query_start_loc_cpu[requests:] - rows
    assert batch.seq_lens_cpu_upper_bound is not None
    assert batch.is_prefilling is not None
    return batch.replace(
        query_start_loc=batch.query_start_loc[requests:] - rows,
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens[requests:].clone(),
        num_reqs=batch.num_reqs - requests,
        num_actual_tokens=batch.num_actual_tokens - rows,
        max_query_len=int(starts.diff().max()),
        block_table_tensor=batch.block_table_tensor[requests:].clone(),
        slot_mapping=batch.slot_mapping[rows:],
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[requests:],
        is_prefilling=batch.is_prefilling[requests:],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


class GdnTreeBackend(GDNAttentionBackend):
    """The backend of `GdnTreeLayer`."""

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        """The metadata builder."""
        return GdnTreeBuilder


class GdnTreeLayer(QwenGatedDeltaNetAttention):
    """vLLM's layer, with states as if nothing were drafted: one per request.

    Attributes:
        kept: What nodes leave for the commit; set once layers are loaded.
        place: Which of its layers this is.
    """

    kept: KeptNodes
    place: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = 0
        self.enable_fused_gdn_spec_decode = False  # vLLM's kernel for chains

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Returns vLLM's, without states for drafts."""
        return replace(super().get_kv_cache_spec(vllm_config), num_speculative_blocks=0)

    def get_attn_backend(self) -> type[GDNAttentionBackend]:
        """Our backend."""
        return GdnTreeBackend

    @property
    def unsupported_heads(self) -> str | None:
        """The reason why our kernels cannot serve this layer; None: they can."""
        try:
            _ = self.shape
        except ValueError as error:
            return f"layer {self.prefix} has {error}"
        return None

    @property
    def shape(self) -> GdnShape:
        """Sizes of this rank's heads. ValueError: our kernels have no such."""
        heads = self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size
        return GdnShape(*heads, self.head_k_dim, self.head_v_dim)

    @property
    def last_inputs(self) -> Tensor:
        """``[blocks, W - 1, C]``: each request's last inputs."""
        inputs = self.kv_cache[0]
        return inputs.transpose(1, 2) if is_conv_state_dim_first() else inputs

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Computes tree nodes, and calls vLLM's for all other rows."""
        context = get_forward_context()
        steps = context.attn_metadata
        found = steps.get(self.prefix) if isinstance(steps, dict) else None
        if not isinstance(found, GdnTreeMetadata):
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        rows = found.num_rows
        assert found.tree is not None
        weight = self.conv1d.weight
        kept: dict[str, Any] = {"nodes": found.tree, "kept": self.kept, "layer": self.place}
        convolved = convolve_nodes(
            mixed_qkv[:rows], weight.view(weight.size(0), weight.size(2)), self.conv1d.bias,
            history=self.last_inputs, silu=self.activation in ("silu", "swish"), **kept,
        )  # fmt: skip
        score_nodes(
            convolved, a, b, self.A_log, self.dt_bias, states=self.kv_cache[1],
            output=core_attn_out, **kept,
        )  # fmt: skip
        if found.others is not None:
            others = replace(context, attn_metadata={self.prefix: found.others})
            with override_forward_context(others):
                super()._forward_core(mixed_qkv[rows:], b[rows:], a[rows:], core_attn_out[rows:])


@contextmanager
def replaced_gdn_layers() -> Iterator[None]:
    """Within it, models are built with our layers; a plain engine beside never sees them."""
    name = QwenGatedDeltaNetAttention.__name__
    assert name not in op_registry_oot
    op_registry_oot[name] = GdnTreeLayer
    try:
        yield
    finally:
        del op_registry_oot[name]
