"""Layers with latent attention (MLA): vLLM's Triton backend, but trees go through our kernel.

In decoding all heads share one key head: a key is a whole latent, its value the first channels.
Requests that `LatentTreeBuilder` has decoded may be chains of several rows. Our kernel takes them,
too, as it does trees: vLLM's takes only requests of equally many rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)

from sequoia_vllm.drafting.growth import NodeQueries
from sequoia_vllm.engine.runner.attention_layers import LatentTreeBuilder
from sequoia_vllm.engine.v2.attention.attention_gpu import DraftMetadata, GPUTreeQueries
from sequoia_vllm.engine.v2.attention.scoring import ScoringTreesV2
from sequoia_vllm.kernels.tree_attention import EXTRA_SIZES, tree_attention
from sequoia_vllm.kernels.write_cache import write_cache


def decoded_nodes(
    trees: ScoringTreesV2 | None, metadata: Any, chain: Tensor
) -> Iterator[tuple[NodeQueries, Tensor]]:
    """What our kernel decodes of a batch, with its block tables: trees, then chains.

    Requests of one row each are vLLM's own, unless there are trees beside them.

    Args:
        trees: The batch's, whose requests come first; None: it has none.
        metadata: vLLM's, of all requests.
        chain: Ancestors of the longest chain that our kernel takes.
    """
    first, last = 0, metadata.num_decodes
    if trees is not None:
        first = trees.num_requests
        yield trees, metadata.block_table[:first]
    elif metadata.num_decode_tokens == last:
        return
    if first == last:
        return
    starts = metadata.query_start_loc[first : last + 1]
    lengths = metadata.decode.seq_lens[first:]
    yield chains_of(starts, lengths, chain, metadata), metadata.block_table[first:]


def chains_of(starts: Tensor, lengths: Tensor, chain: Tensor, metadata: Any) -> NodeQueries:
    """Requests whose rows are the last of so many tokens, as nodes of a ``chain``."""
    contexts = lengths - starts.diff()
    return NodeQueries(
        request_slots=contexts.long(),  # all have one mask
        context_lens=contexts,
        query_start_loc=starts,
        first=0,
        width=min(len(chain), metadata.max_query_len),
        ancestors=chain,
        max_keys=metadata.max_seq_len,
    )


class MLATreeImpl(TritonMLAImpl):
    """vLLM's latent attention in Triton, with trees, and with sinks."""

    def __init__(self, *args: Any, sinks: Tensor | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sinks = sinks  # of Hy4's MTP layer: float32, one for each head of this rank

    @property
    def unsupported_features(self) -> dict[str, bool]:
        """Features that our kernel cannot serve, and whether this layer has them."""
        extra = self.qk_rope_head_dim
        return {f"latents with {extra} channels for positions": extra not in EXTRA_SIZES}

    # Until: vLLM's operator writes latents that are not finite so that masks hide them.
    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor,
        kv_cache_dtype: str, k_scale: Tensor, *_: Any,
    ) -> None:  # fmt: skip
        """Writes like vLLM's operator, but latents that are not finite like `write_cache`.

        A latent is a value, and part of a key. The key's other channels, for positions, take NaN.
        """
        if kv_cache.numel() == 0:
            return
        values, keys = kv_cache.unsqueeze(2).split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        write_cache(
            k_pe.view(len(k_pe), 1, -1), kv_c_normed[:, None], keys, values,
            slot_mapping.flatten(), k_scale, k_scale, divides_exactly=True,
        )  # fmt: skip

    def reserve_workspace(self) -> None:
        """Reserves memory for one row per request, like `LatentTreeBuilder`, where vLLM asks."""
        requests = self._vllm_config.scheduler_config.max_num_seqs
        triton_mla._reserve_attn_logits_workspace(
            self._vllm_config, requests, self.num_heads, self.kv_lora_rank
        )

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs decoding like vLLM's, but masks each tree node to its ancestors."""
        trees: tuple[GPUTreeQueries, ...] = getattr(attn_metadata, "tree", ())
        if isinstance(attn_metadata, DraftMetadata):
            trees = (attn_metadata.tree,)
        if not trees:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        keys = kv_c_and_k_pe_cache.unsqueeze(2)
        output = query.new_zeros(*query.shape[:2], self.kv_lora_rank)
        for tree in trees:
            tree_attention(
                query,
                keys,
                keys[..., : self.kv_lora_rank],
                tree,
                tree.mask_for(),
                scale=self.scale,
                key_scale=layer._k_scale,
                value_scale=layer._k_scale,
                output=output,
                sinks=self.sinks,
            )
        return output, None


class MLATreeBuilder(LatentTreeBuilder, TritonMLAMetadataBuilder):
    """Builds vLLM's metadata of latent attention in Triton."""


class MLATreeBackend(TritonMLABackend):
    """Registered for TRITON_MLA in the workers of a Sequoia engine only."""

    get_impl_cls = staticmethod(lambda: MLATreeImpl)
    get_builder_cls = staticmethod(lambda: MLATreeBuilder)

    @classmethod
    def supports_sink(cls) -> bool:
        """True: vLLM's MTP layer of Hy4 drops its sinks where a backend does not say so."""
        return True
