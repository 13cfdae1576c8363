"""vLLM's operators of sparse latent attention in torch, for its GPU engine without a GPU.

They take the parameters, shapes and types that vLLM's callers give the real ones: DeepGEMM's
scores, the choice of tokens, FlashMLA's sparse attention. Scores that the real ones leave undefined
are NaN. Of equal scores the earlier token's is better, in plain engines and with trees.
"""

import functools
import os
import sys
import types
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.support.latents import rehearse_on_gpus, write_latents
from tests.support.recurrent import run_without_dependent_launches

_FP8, _SCALE_BYTES = torch.float8_e4m3fn, 4
_CUTE = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"


def rehearse_sparse_on_gpus() -> None:
    """Test only: DeepSeek V3.2's class runs here, in float32."""
    # As the configuration of these models sets it; layers may be imported before.
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    rehearse_on_gpus()
    run_without_dependent_launches()
    # Another form of a Triton kernel, in a language that is compiled for GPUs alone.
    cute: Any = types.ModuleType(_CUTE)
    cute.is_fused_q_cutedsl_supported, cute.fused_q_cutedsl = lambda *_, **__: False, None
    sys.modules[_CUTE] = cute

    from gpu_stand_in import graphs
    from vllm import _custom_ops as operators
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.v1.attention.backends.mla import flashmla_sparse, indexer

    for module in (sparse_attn_indexer, indexer):
        module.has_deep_gemm = lambda: True
    indexer.get_paged_mqa_logits_metadata = _plan
    as_kernel = graphs.device_function
    sparse_attn_indexer.fp8_fp4_paged_mqa_logits = _scores_of_pages
    sparse_attn_indexer.fp8_fp4_mqa_logits = _scores_of_rows
    operators.cp_gather_indexer_k_quant_cache = as_kernel(_gather_keys)
    operators.top_k_per_row_prefill = as_kernel(_choose_in_prompts)
    operators.top_k_per_row_decode = as_kernel(_choose)
    operators.concat_mla_q = as_kernel(_concat)
    operators.indexer_k_quant_and_cache = as_kernel(_keep_keys)
    flashmla_sparse.flash_mla_sparse_fwd = _attend
    flashmla_sparse.FlashMLASparseBackend.supported_dtypes = [torch.float32]
    implementation = flashmla_sparse.FlashMLASparseImpl
    start = implementation.__init__

    @functools.wraps(start)  # an engine's start compares its parameters
    def in_float32(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self.workspace_specs = [(shape, torch.float32) for shape, _ in self.workspace_specs]
        flashmla_sparse.current_workspace_manager().get_simultaneous(*self.workspace_specs)

    implementation.__init__ = in_float32


def rehearse_hy4_on_gpus() -> None:
    """Test only: so does Hy4's, whose heads have sinks."""
    rehearse_sparse_on_gpus()
    from vllm import _custom_ops as operators
    from vllm.models.hy_v4.nvidia import attention, flashmla_sparse

    operators.concat_and_cache_mla = _write_latents
    flashmla_sparse.flash_mla_sparse_fwd = _attend
    attention.per_token_group_quant_fp8 = _in_fp8


def _plan(context_lens: Tensor, block_size: int, num_sms: int, indices: Any = None) -> Tensor:
    assert context_lens.ndim == 2
    assert context_lens.dtype == torch.int32
    assert indices is None  # as on an H100
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


def _score(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """``[m]``: of queries ``[H, D]`` with weights ``[H]`` and keys ``[m, D]``."""
    return (weights[:, None] * (queries.float() @ keys.T).clamp(min=0)).sum(0)


def _scores_of_pages(
    q: tuple[Tensor, None], kv_cache: Tensor, weights: Tensor, context_lens: Tensor,
    block_tables: Tensor, schedule_metadata: Tensor, max_model_len: int,
    clean_logits: bool = False, indices: None = None,
) -> Tensor:  # fmt: skip
    """DeepGEMM's: float32 ``[B * next_n, max_model_len]``; undefined behind a row's length."""
    queries, _ = q
    assert queries.ndim == 4
    assert queries.dtype == _FP8
    assert kv_cache.dtype == torch.uint8
    assert kv_cache.shape[2:] == (1, queries.shape[-1] + _SCALE_BYTES)
    assert len(block_tables) == len(queries)
    assert context_lens.shape == queries.shape[:2]
    assert weights.shape == (context_lens.numel(), queries.shape[2])
    assert weights.dtype == torch.float32
    scores = torch.empty(context_lens.numel(), max_model_len)
    from gpu_stand_in.graphs import device_function

    device_function(_fill_scores)(
        queries.flatten(0, 1), kv_cache, weights, context_lens, block_tables, scores
    )
    return scores


def _fill_scores(
    queries: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, tables: Tensor, scores: Tensor
) -> None:
    scores.fill_(torch.nan)
    slots, size = cache.shape[1], queries.shape[-1]
    for row, length in enumerate(lengths.flatten().tolist()):
        blocks = tables[row // lengths.shape[1], : -(-length // slots)].long()
        pages = cache[blocks].flatten(1)
        keys = pages[:, : slots * size].view(_FP8).float().view(-1, size)
        scales = pages[:, slots * size :].contiguous().view(torch.float32).view(-1, 1)
        scores[row, :length] = _score(queries[row], weights[row], (keys * scales)[:length])


def _in_fp8(
    x: Tensor, group_size: int, *, column_major_scales: bool, use_ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """vLLM's: each row with one scale, a power of two."""
    assert x.shape[-1] == group_size
    assert use_ue8m0
    assert not column_major_scales
    largest = torch.finfo(_FP8).max
    scales = torch.exp2((x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / largest).log2().ceil())
    return (x / scales).clamp(-largest, largest).to(_FP8), scales


def _keep_keys(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, quant_block_size: int, scale_fmt: str
) -> None:
    """vLLM's: writes keys, and their scales behind all keys of a block."""
    keys, scales = _in_fp8(
        k, quant_block_size, column_major_scales=False, use_ue8m0=scale_fmt == "ue8m0"
    )
    slots, size = kv_cache.shape[1], keys.shape[1]
    pages = kv_cache.flatten(1)
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, place = pages[slot // slots], slot % slots
            page[place * size : (place + 1) * size] = keys[row].view(torch.uint8)
            first = slots * size + place * _SCALE_BYTES
            page[first : first + _SCALE_BYTES] = scales[row].view(torch.uint8)


def _write_latents(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *,
    kv_cache_dtype: str, scale: Tensor, skip_scale: bool = False,
) -> None:  # fmt: skip
    assert kv_cache_dtype == "auto"
    assert not skip_scale
    write_latents(None, kv_c, k_pe, kv_cache, slot_mapping)


def _gather_keys(
    cache: Tensor, keys: Tensor, scales: Tensor, block_table: Tensor, cu_seq_lens: Tensor
) -> None:
    slots, size = cache.shape[1], keys.shape[1]
    for request, (first, end) in enumerate(pairwise(cu_seq_lens.tolist())):
        pages = cache[block_table[request, : -(-(end - first) // slots)].long()].flatten(1)
        keys[first:end] = pages[:, : slots * size].view(_FP8).reshape(-1, size)[: end - first]
        found = pages[:, slots * size :].reshape(-1, _SCALE_BYTES)
        scales[first:end] = found[: end - first]


def _scores_of_rows(
    q: tuple[Tensor, None], kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor, max_seqlen_k: int | None = None, *, clean_logits: bool = False,
) -> Tensor:  # fmt: skip
    """DeepGEMM's for prompts, float32; undefined outside of a row's range.

    For vLLM 0.33 a row begins with its range: ``[M, max_seqlen_k]``. For 0.32, which gives no such
    number, it has the range's place among all keys: ``[M, N]``.
    """
    keys = kv[0].float() * kv[1][:, None]
    scores = torch.full((len(q[0]), max_seqlen_k or len(keys)), torch.nan)
    bounds = zip(cu_seqlen_ks.tolist(), cu_seqlen_ke.tolist(), strict=True)
    for row, (first, end) in enumerate(bounds):
        start = first if max_seqlen_k is None else 0
        scores[row, start : start + end - first] = _score(q[0][row], weights[row], keys[first:end])
    return scores


def _best(scores: Tensor, chosen: Tensor, most: int) -> None:
    """A short row has all that it has."""
    order = torch.arange(len(scores))
    if len(scores) > most:
        order = torch.sort(scores, descending=True, stable=True).indices[:most]
    chosen.fill_(-1)
    chosen[: len(order)] = order.int()


def _choose_in_prompts(
    logits: Tensor, starts: Tensor, ends: Tensor, indices: Tensor, rows: int, stride0: int,
    stride1: int, most: int,
) -> None:  # fmt: skip
    for row, (first, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        _best(logits[row, first:end], indices[row], most)


def _choose(
    logits: Tensor, next_n: int, seq_lens: Tensor, indices: Tensor, rows: int, stride0: int,
    stride1: int, most: int,
) -> None:  # fmt: skip
    """Rows of ``next_n`` requests each end one token later than the one before, if not told."""
    assert seq_lens.dtype == torch.int32
    lengths = seq_lens.flatten()
    if len(lengths) != rows:
        lengths = (lengths[:, None] - next_n + 1 + torch.arange(next_n)).clamp(min=0).flatten()
    for row, length in enumerate(lengths.tolist()):
        _best(logits[row, :length], indices[row], most)


def _concat(nope: Tensor, rotated: Tensor, out: Tensor) -> None:
    out[:, : nope.shape[1]] = torch.cat((nope, rotated), dim=-1)


def _attend(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512,
    attn_sink: Tensor | None = None, topk_length: Tensor | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FlashMLA's: ``[T, H, d_v]``, and maxima and log-sum-exps ``[T, H]``.

    Args:
        q: ``[T, H, D]``, H a multiple of 64.
        kv: ``[slots, 1, D]``.
        indices: int32 ``[T, 1, k]``; -1 for none.
        attn_sink: float32 ``[H]``: the logit of a key without a value.
        topk_length: int32 ``[T]``: no more of ``indices`` are read.
    """
    assert q.shape[1] % 64 == 0
    assert kv.shape[1:] == (1, q.shape[2])
    assert indices.dtype == torch.int32
    assert indices.shape[:2] == (len(q), 1)
    assert topk_length is not None
    if out is None:
        out = q.new_empty(*q.shape[:2], d_v)
    maxima, sums = (torch.empty(q.shape[:2]) for _ in range(2))
    from gpu_stand_in.graphs import device_function

    if attn_sink is None:
        attn_sink = torch.full(q.shape[1:2], -torch.inf)
    rest = sm_scale, topk_length, attn_sink, maxima, sums, out
    device_function(_fill_attention)(q, kv, indices, *rest)
    return out, maxima, sums


def _fill_attention(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, counts: Tensor, sinks: Tensor,
    maxima: Tensor, sums: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    for row, count in enumerate(counts.tolist()):
        slots = indices[row, 0, :count].long()
        latents = kv[slots[slots >= 0], 0]
        products = q[row] @ latents.T * scale
        shares = torch.cat((products, sinks[:, None]), dim=-1).softmax(-1)[:, :-1]
        out[row] = shares @ latents[:, : out.shape[-1]]
        if len(latents):
            maxima[row], sums[row] = products.max(-1).values, products.logsumexp(-1)
    return out
