"""Attention over contexts by vLLM's FlashAttention, from which `tree_attention` can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def attend_to_contexts(
    flash_attn_varlen_func: Callable[..., Any],
    version: int,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_queries: int,
    max_context: int,
    scale: float,
    output: Tensor,
) -> Tensor:
    """Writes the attention of every tree node over its context into its row of ``output``.

    All nodes of a request see the same keys: FlashAttention needs no mask.

    Args:
        flash_attn_varlen_func: vLLM's.
        version: Of FlashAttention: 2 or 3.
        query, key_cache, value_cache, block_table, context_lens, query_start_loc, scale,
            output: As `sequoia_vllm.kernels.tree_attention.tree_attention` takes them.
        max_queries: No request has more rows.
        max_context: Nor a longer context.

    Returns:
        Log-sum-exps, float32 ``[Hq, T]``: ``context_lse`` of `tree_attention`.
    """
    _, context_lse = flash_attn_varlen_func(
        q=query,
        k=key_cache,
        v=value_cache,
        out=output,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=max_queries,
        seqused_k=context_lens,
        max_seqlen_k=max_context,
        softmax_scale=scale,
        causal=False,
        block_table=block_table,
        return_softmax_lse=True,
        fa_version=version,
    )
    return context_lse
