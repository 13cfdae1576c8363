"""Latent attention (MLA) on CPUs: vLLM's own, plus tree attention where a batch has trees."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from sequoia_vllm.attention.tree_attention import tree_attention
from sequoia_vllm.engine.runner.attention_layers import LatentTreeBuilder
from sequoia_vllm.engine.runner.cpu_attention import TreeQueries


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

    @staticmethod
    def get_impl_cls() -> type[CPUMLAImpl]:
        """The attention implementation."""
        return CPUMLATreeImpl

    @staticmethod
    def get_builder_cls() -> type[LatentTreeBuilder]:
        """The metadata builder."""
        return LatentTreeBuilder
