"""CPU attention backends: vLLM's own (MLA's, too), plus tree attention where a batch has trees."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sequoia_vllm.attention.cpu_kernel import (
    PACKED_ISA,
    SUPPORTED_ISA,
    AttentionShape,
    TreeQueries,
    gather_context,
    load_kernels,
)
from sequoia_vllm.attention.tree_attention import tree_attention
from sequoia_vllm.engine.runner.attention_layers import (
    LatentTreeBuilder,
    TreeForward,
    reason_of,
    unmaskable_features,
    window_of,
)

_shape_of_layers = cache(AttentionShape)


@dataclass
class CPUTreeAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a batch with tree nodes."""

    tree: TreeQueries | None = None

    @classmethod
    def of_trees(cls, tree: TreeQueries, slots: Tensor) -> "CPUTreeAttentionMetadata":
        """Metadata of a draft's pass, whose rows are all tree nodes, in slots int64 ``[rows]``."""
        return cls(
            num_actual_tokens=len(slots),
            max_query_len=tree.rows.shape[1],
            query_start_loc=tree.rows[:, 0],
            max_seq_len=tree.max_keys,
            seq_lens=tree.context_lens,
            block_table=tree.block_table,
            slot_mapping=slots,
            scheduler_metadata=None,
            tree=tree,
        )


class CPUTreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Pins a cache layout that we can read."""

    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kernels = load_kernels()  # compiled now, not in the first step
        readable = SUPPORTED_ISA if kernels is None else (*SUPPORTED_ISA, PACKED_ISA)
        # "vec" reads and writes the same cache for the same dtypes, in a layout that torch reads.
        if self.isa not in readable:
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)


class CPUTreeAttentionImpl(TreeForward, CPUAttentionBackendImpl):
    """vLLM's CPU kernel for chains of tokens; masked attention for tree nodes."""

    _shape: AttentionShape | None = None

    @cached_property
    def _sinks(self) -> Tensor | None:
        """Read when the weights are loaded."""
        return None if self.sinks is None else self.sinks.detach().float().contiguous()

    def _forward_trees(
        self, layer: Any, query: Tensor, kv_cache: Tensor, tree: TreeQueries, output: Tensor
    ) -> None:
        # Once: a step waits for what Python does between a layer's operations.
        if (shape := self._shape) is None:
            shape = self._shape = _shape_of_layers(
                self.num_heads, self.num_kv_heads, self.head_size, kv_cache.shape[2], self.scale,
                kv_cache.dtype, window_of(self), self.logits_soft_cap, layer.isa == PACKED_ISA,
            )  # fmt: skip
        kernels = load_kernels()
        if kernels is not None and shape.supported:
            tree.for_kernel(shape).attend(kernels, query, kv_cache, output, self._sinks)
        else:
            self._forward_gathered(query, kv_cache, tree, output)

    def _forward_gathered(
        self, query: Tensor, kv_cache: Tensor, tree: TreeQueries, output: Tensor
    ) -> None:
        """Without the compiled kernel: over a copy of the context, in torch."""
        keys, values = gather_context(kv_cache, tree.blocks_in_use(kv_cache.shape[2]))
        heads = (-1, self.num_heads, self.head_size)
        queries = query.view(heads)[tree.rows.clamp(min=0)]
        mask = tree.mask(keys.shape[2], query.dtype, window_of(self))
        unseen = tree.unseen(keys.shape[2], mask)[:, None, :, None]
        values = values.masked_fill(unseen, 0)
        tree.note(values)
        attended = tree_attention(
            queries, keys.masked_fill(unseen, 0), values, mask, self.scale, self.logits_soft_cap,
            self._sinks,
        )  # fmt: skip
        is_node = tree.rows >= 0
        output.view(heads)[tree.rows[is_node]] = attended[is_node]


class CPUTreeAttentionBackend(CPUAttentionBackend):
    """Registered for CPU_ATTN in the workers of a Sequoia engine only."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Also 16: vLLM takes that on CPUs for a target with MLA, and so for its draft."""
        return [MultipleOf(16)]

    get_impl_cls = staticmethod(lambda: CPUTreeAttentionImpl)
    get_builder_cls = staticmethod(lambda: CPUTreeAttentionMetadataBuilder)


CPU_BACKENDS = {
    AttentionBackendEnum.CPU_ATTN: f"{__name__}.{CPUTreeAttentionBackend.__qualname__}",
    AttentionBackendEnum.CPU_MLA: f"{__name__}.CPUMLATreeBackend",
}
"""Our backends, under the names that CPU layers look up."""
_OTHER = {"AMXMLAImpl": " (use --attention-backend CPU_MLA)"}  # where vLLM finds AMX


def unsupported_attention(layer_name: str, impl: Any) -> str | None:
    """Why tree attention cannot serve this layer, or None."""
    features = {
        **unmaskable_features(impl),
        "a quantized KV cache": bool(getattr(impl, "is_fp8_kv_cache", False)),
        f"the backend {type(impl).__name__}{_OTHER.get(type(impl).__name__, '')}": (
            not hasattr(impl, "_forward_trees")
        ),
    }
    return reason_of(layer_name, features)


class CPUMLATreeImpl(CPUMLAImpl):
    """vLLM's CPU kernel for chains of tokens; masked attention to latents for tree nodes.

    In decoding all heads share one key head: a key is a whole latent, its value the first channels.
    """

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs decoding like vLLM's, but masks each tree node to its ancestors."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tree: TreeQueries | None = getattr(attn_metadata, "tree", None)
        if tree is not None and tree.only_trees:
            output = query.new_zeros(*query.shape[:2], self.kv_lora_rank)
        else:
            rows = _row_by_row(attn_metadata)
            output, _ = super().forward_mqa(query, kv_c_and_k_pe_cache, rows, layer)
        if tree is not None:
            self._forward_trees(query, kv_c_and_k_pe_cache, tree, output)
        return output, None

    def _forward_trees(
        self, query: Tensor, kv_cache: Tensor, tree: TreeQueries, output: Tensor
    ) -> None:
        """Writes the rows of tree nodes; all heads of a node are queries of the one key head."""
        keys = kv_cache[tree.blocks_in_use(kv_cache.shape[1]).long()].flatten(1, 2)
        mask = tree.mask(keys.shape[1], query.dtype, None)
        keys = keys.masked_fill(tree.unseen(keys.shape[1], mask)[..., None], 0)[:, None]
        tree.note(keys)
        queries = query[tree.rows.clamp(min=0)]
        attended = tree_attention(
            queries.flatten(1, 2).unsqueeze(2), keys, keys[..., : self.kv_lora_rank],
            mask.repeat_interleave(queries.shape[2], dim=2), self.scale,
        )  # fmt: skip
        is_node = tree.rows >= 0
        output[tree.rows[is_node]] = attended.view(*queries.shape[:3], -1)[is_node]


def _row_by_row(metadata: Any) -> Any:
    """vLLM's metadata as if each decoded row were a request: its kernel reads one row of each."""
    if metadata.num_decode_tokens == metadata.num_decodes:
        return metadata
    ends = metadata.query_start_loc[: metadata.num_decodes + 1]
    request = torch.arange(metadata.num_decodes).repeat_interleave(ends.diff())
    later = ends[1:][request] - 1 - torch.arange(metadata.num_decode_tokens)
    decode = replace(
        metadata.decode,
        block_table=metadata.decode.block_table[request],
        seq_lens=metadata.decode.seq_lens[request] - later,
    )
    return replace(metadata, decode=decode)


class CPUMLATreeBackend(CPUMLABackend):
    """Registered for CPU_MLA in the workers of a Sequoia engine only."""

    get_impl_cls = staticmethod(lambda: CPUMLATreeImpl)
    get_builder_cls = staticmethod(lambda: LatentTreeBuilder)
