"""CPU attention backend: vLLM's own, plus tree attention where a batch has trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from sequoia_vllm.attention.cpu_cache import SUPPORTED_ISA, gather_context
from sequoia_vllm.attention.tree_attention import tree_attention


@dataclass
class TreeQueries:
    """The rows of a batch that are tree nodes, and what they attend to.

    Attributes:
        rows: int64 ``[B, Q]``: row of each node in the batch's flat tokens.
        is_node: bool ``[B, Q]``, or None if every entry is a node. Padding
            entries hold any valid row and are computed but not written.
        block_table: int32 ``[B, blocks]``: each request's cache blocks.
        mask: ``[B, 1, Q, blocks * block_size]``, additive.
        only_trees: No row of the batch is anything but a tree node.
    """

    rows: Tensor
    is_node: Tensor | None
    block_table: Tensor
    mask: Tensor
    only_trees: bool


@dataclass
class CPUTreeAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata; ``tree`` is None for a batch without tree nodes."""

    tree: TreeQueries | None = None


class CPUTreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds `CPUTreeAttentionMetadata`, and pins a cache layout we can read."""

    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # "amx" packs keys in tiles; "vec" reads and writes the same cache for
        # the same dtypes, in the layout of attention/cpu_cache.py.
        if self.isa not in SUPPORTED_ISA:
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUTreeAttentionMetadata:
        """vLLM's metadata as our subclass, with no trees yet."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return CPUTreeAttentionMetadata(**vars(metadata))


class CPUTreeAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU kernel for chains of tokens; masked attention for tree nodes."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """As vLLM's; rows of tree nodes are computed with their tree's mask.

        The kernel has no mask argument and treats every request as a chain, so
        what it writes for tree rows is replaced (design: context plus
        ancestors, in one softmax).
        """
        tree = getattr(attn_metadata, "tree", None)
        if tree is None or not tree.only_trees:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        if tree is not None:
            self._forward_trees(query, kv_cache, tree, output)
        return output

    def _forward_trees(
        self, query: Tensor, kv_cache: Tensor, tree: TreeQueries, output: Tensor
    ) -> None:
        keys, values = gather_context(kv_cache, tree.block_table)
        heads = (-1, self.num_heads, self.head_size)
        attended = tree_attention(query.view(heads)[tree.rows], keys, values, tree.mask, self.scale)
        rows = tree.rows
        if tree.is_node is not None:
            rows, attended = rows[tree.is_node], attended[tree.is_node]
        output.view(heads)[rows] = attended


class CPUTreeAttentionBackend(CPUAttentionBackend):
    """Registered for CPU_ATTN in the workers of a Sequoia engine only."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The attention implementation."""
        return CPUTreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The metadata builder."""
        return CPUTreeAttentionMetadataBuilder


def unsupported_attention(layer_name: str, impl: Any) -> str | None:
    """Why tree attention cannot serve this layer, or None."""
    features = {
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "a logits soft cap": bool(getattr(impl, "logits_soft_cap", 0)),
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "a sliding window": getattr(impl, "sliding_window", -1) not in (-1, None, (-1, -1)),
        "a quantized KV cache": bool(getattr(impl, "is_fp8_kv_cache", False)),
        "attention other than decoder self-attention": getattr(impl, "attn_type", "decoder")
        != "decoder",
        f"the backend {type(impl).__name__}": not isinstance(impl, CPUTreeAttentionImpl),
    }
    used = [name for name, present in features.items() if present]
    return f"layer {layer_name} uses {', '.join(used)}" if used else None


def make_tree_queries(
    rows: Tensor,
    is_node: Tensor | None,
    block_table: Tensor,
    block_size: int,
    num_keys: int,
    mask_of: Callable[[int], Tensor],
    only_trees: bool,
) -> TreeQueries:
    """Cuts the block table to the blocks in use and builds the mask over them.

    Args:
        rows, is_node, only_trees: See `TreeQueries`.
        block_table: int32 ``[B, max_blocks]``.
        block_size: Tokens per block.
        num_keys: Slots that any request of the batch uses.
        mask_of: ``num_keys -> mask [B, 1, Q, num_keys]``.
    """
    blocks = -(-num_keys // block_size)
    return TreeQueries(
        rows=rows,
        is_node=is_node,
        block_table=block_table[:, :blocks],
        mask=mask_of(blocks * block_size),
        only_trees=only_trees,
    )
