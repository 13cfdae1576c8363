"""GPU attention backends: vLLM's own, plus tree attention where a batch has trees.

Prompts and plain decoding go through the class that vLLM chose. Only tree nodes go through our
kernel, which reads the same KV cache. No row goes through both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from sequoia_vllm.drafting.growth import NodeQueries
from sequoia_vllm.engine.runner.attention_layers import window_of
from sequoia_vllm.engine.v2.attention.attention_gpu_writes import WritingForward
from sequoia_vllm.engine.v2.attention.scoring import OtherRows, ScoringTreesV2
from sequoia_vllm.kernels.node_masks import NodeMask, NodeMasks
from sequoia_vllm.kernels.split_plan import SplitPlan
from sequoia_vllm.kernels.tree_attention import TreeAttentionWorkspace, tree_attention


def other_chains(trees: ScoringTreesV2, metadata: Any) -> OtherRows | None:
    """The batch's other rows with vLLM's metadata of these alone; None: nothing is left.

    Tensors that begin in the middle of a buffer are copied: Triton compiles a kernel for the
    alignment of its pointers, and would compile vLLM's again while requests wait.
    """
    if (rows := trees.others) is None:
        return None
    begin = trees.num_requests
    alone = replace(
        metadata,
        num_actual_tokens=metadata.num_actual_tokens - rows.first,
        max_query_len=rows.max_rows,
        query_start_loc=metadata.query_start_loc[begin:] - rows.first,
        max_seq_len=rows.max_keys,
        seq_lens=metadata.seq_lens[begin:].clone(),
        block_table=metadata.block_table[begin:].clone(),
        scheduler_metadata=None,  # FlashAttention 3's plan is for all rows; now each layer plans
        **_ranges_of_images(metadata, begin, rows.first),
    )
    return replace(rows, metadata=alone)


def _ranges_of_images(metadata: Any, request: int, row: int) -> dict[str, Any]:
    """Where images' tokens see each other, by request or row, without the first of either."""
    ranges: dict[str, Any] = {}
    if (by_request := getattr(metadata, "mm_prefix_range_tensor", None)) is not None:
        ranges["mm_prefix_range_tensor"] = by_request[request:].clone()
        ranges["mm_prefix_range"] = {
            index - request: found
            for index, found in metadata.mm_prefix_range.items()
            if index >= request
        }
    if (by_row := getattr(metadata, "mm_prefix_query_range_tensor", None)) is not None:
        ranges["mm_prefix_query_range_tensor"] = by_row[row:].clone()
    return ranges


@dataclass(frozen=True, kw_only=True)
class GPUTreeQueries(NodeQueries):
    """Tree nodes of a pass of draft or target, and what they attend to."""

    block_table: Tensor  # int32 ``[R, max_blocks]``: the cache blocks of each request
    masks: NodeMasks  # the kernel's form of ``ancestors``, made once for each window
    workspace: TreeAttentionWorkspace  # the kernel's buffers
    others: OtherRows | None = None  # the batch's other rows; None: it has none
    flash_max_context: int | None = None
    """Longest context, if FlashAttention reads the contexts; None: our kernel reads them."""
    plans: dict[Any, SplitPlan] = field(default_factory=dict)
    """The device's own, of layers of each shape, where requests are uneven."""
    in_chunks: dict[int, GPUTreeQueries] = field(default_factory=dict)
    """What layers with chunks of each size take instead: see `chunked_layers`."""

    @property
    def only_trees(self) -> bool:
        """True if every row of the batch is a tree node."""
        return self.others is None

    def mask_for(self, window: int | None = None) -> NodeMask:
        """What nodes see in layers with this window; one of changing trees is longer than them."""
        if self.mask is None:
            return self.masks.of(self.ancestors, window)
        return replace(self.mask, window=window)


@dataclass(frozen=True)
class DraftMetadata:
    """Attention metadata of a draft pass, whose rows are all tree nodes."""

    tree: GPUTreeQueries
    slot_mapping: Tensor  # int64 ``[rows]``: slots of their keys and values

    # What vLLM's latent layers (MLA) ask of a batch. All of its rows are decoded: none reads a
    # prompt by keys and values of each head.
    num_prefills = 0
    decode = True

    @property
    def num_actual_tokens(self) -> int:
        """All rows."""
        return len(self.slot_mapping)

    @property
    def num_decode_tokens(self) -> int:
        """All rows."""
        return len(self.slot_mapping)

    @property
    def num_decodes(self) -> int:
        """All requests."""
        return len(self.tree.context_lens)


class GPUTreeForward(WritingForward):
    """Tree attention in Triton, on the KV caches of vLLM's GPU backends."""

    scale: float
    logits_soft_cap: float | None
    sinks: Tensor | None

    @property
    def value_size(self) -> int:
        """Channels of a value; a key has ``head_size``."""
        return self.head_size

    def _chains(
        self, tree: GPUTreeQueries, query: Tensor, attn_metadata: Any, output: Tensor
    ) -> tuple[Tensor, Any, Tensor]:
        """Leaves out tree nodes; keys and values need no cut, as the cache has all rows'."""
        if tree.others is None:
            return query, attn_metadata, output
        first = tree.others.first
        return query[first:], tree.others.metadata, output[first:]

    def _forward_trees(
        self, layer: Any, query: Tensor, kv_cache: Tensor, tree: GPUTreeQueries, output: Tensor
    ) -> None:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        query = query.view(len(query), -1, self.head_size)
        output = output.view(len(output), -1, self.value_size)
        key_scale = layer._k_scale
        if query.dtype != output.dtype:  # vLLM's fp8 queries, for a cache in fp8
            query, key_scale = query.to(output.dtype), key_scale * layer._q_scale
        context_lse = self._attend_to_contexts(query, keys, values, tree, output)
        tree_attention(
            query,
            keys,
            values,
            tree,
            self._mask_of(tree),
            scale=self.scale,
            key_scale=key_scale,
            value_scale=layer._v_scale,
            output=output,
            context_lse=context_lse,
            soft_cap=self.logits_soft_cap or 0.0,
            sinks=self.sinks,
        )

    def _mask_of(self, tree: GPUTreeQueries) -> NodeMask:
        """What nodes see in this layer."""
        return tree.mask_for(window_of(self))

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """False, whatever vLLM's kernels can: ours writes trees' rows in the queries' dtype."""
        return False

    def _attend_to_contexts(
        self, query: Tensor, keys: Tensor, values: Tensor, tree: GPUTreeQueries, output: Tensor
    ) -> Tensor | None:
        """Writes the trees' attention to their contexts.

        Returns:
            Its log-sum-exps, float32 ``[Hq, T]``; None: the trees' kernel does it all.
        """
        return None


class FlashTreeImpl(GPUTreeForward, FlashAttentionImpl):
    """FlashAttention with trees."""

    @property
    def attends_to_contexts(self) -> bool:
        """Whether it can read trees' contexts; version 4 would compile for each new shape."""
        is_plain = not self.logits_soft_cap and self.sinks is None
        # Each node has its own window, which kernels for chains do not support.
        is_plain &= window_of(self) is None and not is_quantized_kv_cache(self.kv_cache_dtype)
        return is_plain and self.vllm_flash_attn_version in (2, 3)

    def _attend_to_contexts(
        self, query: Tensor, keys: Tensor, values: Tensor, tree: GPUTreeQueries, output: Tensor
    ) -> Tensor | None:
        """Uses FlashAttention where the step's contexts are long: see `ContextRule`."""
        if tree.flash_max_context is None or not self.attends_to_contexts:
            return None
        # All nodes of a request see the same keys, so no mask is needed.
        _, context_lse = flash_attn.flash_attn_varlen_func(
            q=query,
            k=canonicalize_singleton_dim_strides(keys),  # for TMA, like vLLM's forward
            v=canonicalize_singleton_dim_strides(values),
            out=output,
            cu_seqlens_q=tree.query_start_loc,
            max_seqlen_q=tree.width,
            seqused_k=tree.context_lens,
            max_seqlen_k=tree.flash_max_context,
            softmax_scale=self.scale,
            causal=False,
            block_table=tree.block_table,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
        )
        return context_lse


class TritonTreeImpl(GPUTreeForward, TritonAttentionImpl):
    """vLLM's Triton attention with trees."""


class FlashTreeBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata; a full CUDA graph holds either trees or one token per request."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class TritonTreeBuilder(TritonAttentionMetadataBuilder):
    """Builds vLLM's metadata; a full CUDA graph holds either trees or one token per request."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class FlashTreeBackend(FlashAttentionBackend):
    """Registered for FLASH_ATTN in the workers of a Sequoia engine only."""

    # Layers of some versions (`CHANGED`) may pass no keys and values to `forward`.
    supports_kv_cache_update_bypass = False

    get_impl_cls = staticmethod(lambda: FlashTreeImpl)
    get_builder_cls = staticmethod(lambda: FlashTreeBuilder)


class TritonTreeBackend(TritonAttentionBackend):
    """Registered for TRITON_ATTN in the workers of a Sequoia engine only."""

    supports_kv_cache_update_bypass = False

    get_impl_cls = staticmethod(lambda: TritonTreeImpl)
    get_builder_cls = staticmethod(lambda: TritonTreeBuilder)
