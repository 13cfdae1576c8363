"""Attention over contexts by another kernel than the trees', as ``context_attention`` has it."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.check.paged import PagedCache
from sequoia_vllm.kernels.tree_attention import attend_to_contexts
from tests.oracles.attention import dense_attention, gathered

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
        return attend_to_contexts(
            function, version, query, keys, values, cache.block_table, context_lens,
            query_start_loc, max_queries=max_queries, max_context=cache.positions, scale=scale,
            output=output,
        )  # fmt: skip

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
        keys, values = (
            gathered(view, cache.block_table[request], context)
            for view in cache.keys_and_values(layer)
        )
        output[rows], lse[:, rows] = dense_attention(query[rows], keys, values, scale)
    return lse
