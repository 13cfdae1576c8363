"""Attention over contexts by another kernel than the trees', as ``context_attention`` has it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.gpu_check.paged import PagedCache
from sequoia_vllm.gpu_check.references import gathered_keys_and_values

ContextAttention = Callable[..., Tensor]
"""Writes attention over contexts to ``output`` and returns its log-sum-exps ``[Hq, T]``.

Called with query, cache, layer, context_lens, query_start_loc, max_queries, scale and output.
"""


def flash_attention() -> ContextAttention | None:
    """vLLM's FlashAttention, in the version that its engines take; None: none is here."""
    if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        return None
    version = {8: 2, 9: 3}.get(torch.cuda.get_device_capability()[0])
    if version is None:
        return None
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
    except ImportError:  # a build without it
        return None
    return flash_call(flash_attn_varlen_func, version)


def flash_call(function: Callable[..., Any], version: int) -> ContextAttention:
    """Calls ``function``, vLLM's ``flash_attn_varlen_func``, for trees over a `PagedCache`."""

    def attend(
        query: Tensor, cache: PagedCache, layer: int, context_lens: Tensor,
        query_start_loc: Tensor, max_queries: int, scale: float, output: Tensor,
    ) -> Tensor:  # fmt: skip
        keys, values = cache.keys_and_values(layer)
        _, lse = function(
            q=query, k=keys, v=values, out=output, cu_seqlens_q=query_start_loc,
            max_seqlen_q=max_queries, seqused_k=context_lens,
            max_seqlen_k=cache.positions, softmax_scale=scale, causal=False,
            block_table=cache.block_table, return_softmax_lse=True, fa_version=version,
        )  # fmt: skip
        return lse

    return attend


def plain_attention(
    query: Tensor, cache: PagedCache, layer: int, context_lens: Tensor, query_start_loc: Tensor,
    max_queries: int, scale: float, output: Tensor,
) -> Tensor:  # fmt: skip
    """The same in torch, request by request: what is checked where FlashAttention is not."""
    lse = torch.full((query.shape[1], len(query)), float("nan"), device=query.device)
    starts = query_start_loc.tolist()
    for request, context in enumerate(context_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        assert rows.stop - rows.start <= max_queries
        keys, values = gathered_keys_and_values(cache, layer, request, context)
        group = query.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * scale
        lse[:, rows] = scores.logsumexp(dim=2)
        weights = scores.softmax(dim=2).nan_to_num(0.0)  # there may be no context
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(output.dtype)
    return lse
