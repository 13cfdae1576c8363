"""vLLM's FlashAttention and cache update, in torch: to a graph they are kernels.

They refuse what the real ones would read wrongly or write twice.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from gpu_stand_in import graphs
from tests.oracles.attention import dense_attention

_VERSIONS = (2, 3)
_FP8 = torch.float8_e4m3fn

attended: Counter[bool] = Counter()
"""Passes that ran, by whether they were causal."""
causal_rows: Counter[int] = Counter()
"""Rows of causal ones, by the address of the layer's cache."""


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None, seqused_k: Tensor | None = None,
    q_v: Tensor | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: list[int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
    return_softmax_lse: bool = False, out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, num_splits: int = 0,
    output_scale: Tensor | None = None, fa_version: int = 3, s_aux: Tensor | None = None, **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over a paged cache ``[blocks, block_size, heads, size]``, with vLLM's parameters.

    Log-sum-exps ``[heads, rows]`` of rows that no request has are not written.
    """
    assert cu_seqlens_k is None
    assert seqused_k is not None
    assert block_table is not None
    assert out is not None
    assert fa_version in _VERSIONS
    assert (q_v, alibi_slopes) == (None, None)
    if s_aux is not None:
        assert fa_version > 2, "version 2 has no sinks"
        assert s_aux.shape == q.shape[1:2]
        assert s_aux.dtype == q.dtype
    # Versions 2 and 3 write them whether or not they are asked for.
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    assert q.dtype == k.dtype == v.dtype
    scales = tuple(
        None if s is None else s.flatten()[:1] for s in (q_descale, k_descale, v_descale)
    )
    _attend(
        q, k, v, scales, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, softmax_scale, causal,
        block_table, out, lse, scheduler_metadata, tuple(window_size or (-1, -1)), softcap, s_aux,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


@graphs.device_function
def _attend(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor | None, ...], max_seqlen_q: int,
    cu_seqlens_q: Tensor, max_seqlen_k: int, seqused_k: Tensor, softmax_scale: float | None,
    causal: bool, block_table: Tensor, out: Tensor, lse: Tensor, scheduler_metadata: Tensor | None,
    window: tuple[int, int], soft_cap: float, sinks: Tensor | None,
) -> None:  # fmt: skip
    attended[causal] += 1
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    if causal:
        causal_rows[k.data_ptr()] += starts[-1] - starts[0]
    if scheduler_metadata is not None:
        planned = scheduler_metadata.tolist()
        assert planned[:2] == [len(lengths), int(max_seqlen_q)], "planned for another batch"
        assert planned[2 : 2 + len(lengths)] == lengths, "planned for other lengths"
    for request, length in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        assert last - first <= max_seqlen_q, f"request {request}: {last - first} rows"
        assert length <= max_seqlen_k, f"request {request}: {length} keys, not {max_seqlen_k}"
        if first < last:
            keys, values = (_gathered(of, block_table[request], length) for of in (k, v))
            out[first:last], lse[:, first:last] = _attention(
                *map(_scaled, (q[first:last], keys, values), scales), softmax_scale, causal,
                window, soft_cap, sinks,
            )  # fmt: skip


def _scaled(values: Tensor, scale: Tensor | None) -> Tensor:
    return values if values.dtype != _FP8 else values.float() * (1.0 if scale is None else scale)


def _gathered(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """float32 ``[length, heads, size]``: what the cache holds of a request."""
    block_size = cache.shape[1]
    blocks = table[: -(-length // block_size)].long()
    assert len(blocks) * block_size >= length, "the block table ends before the request"
    assert ((blocks >= 0) & (blocks < len(cache))).all(), "a block outside the cache"
    if cache.dtype == _FP8:
        return cache.view(torch.uint8)[blocks].view(_FP8).flatten(0, 1)[:length]
    return cache[blocks].flatten(0, 1)[:length].float()


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float | None, causal: bool,
    window: tuple[int, int], soft_cap: float, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs ``[rows, heads, size]`` and log-sum-exps ``[heads, rows]``.

    Keys before all windows are not read: their blocks may be others'.
    """
    left, right = window
    if left >= 0:
        unseen = max(len(keys) - len(query) - left, 0)
        keys, values = keys[unseen:], values[unseen:]
    place = torch.arange(len(keys) - len(query), len(keys))[:, None]
    ahead = torch.arange(len(keys)) - place
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal or right >= 0:
        hidden |= ahead > (0 if causal else right)
    if left >= 0:
        hidden |= ahead < -left
    scale = query.shape[2] ** -0.5 if scale is None else scale
    output, lse = dense_attention(query, keys, values, scale, hidden, soft_cap, sinks)
    return output, lse


@graphs.device_function
def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    kv_cache_dtype: str, k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    """Writes keys and values to their slots; rows of slot -1 have none."""
    block_size = key_cache.shape[1]
    rows = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[rows]
    assert (slots < block_size * len(key_cache)).all(), "a slot outside the cache"
    # vLLM captures its chain with all rows in one request's place: nobody reads what they write.
    is_race = len(slots.unique()) < len(slots) and not graphs.vllm_captures()
    assert not is_race, f"two rows write the same slot: {slots.tolist()}"
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        new = new[rows]
        if kv_cache_dtype.startswith("fp8"):
            new, cache = quantized(new, scale).view(torch.uint8), cache.view(torch.uint8)
        cache[slots // block_size, slots % block_size] = new.to(cache.dtype)


def quantized(values: Tensor, scale: Tensor) -> Tensor:
    """In e4m3, saturated."""
    return (values.float() / scale).clamp(-448.0, 448.0).to(_FP8)


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
    headdim: int, cache_seqlens: Tensor, **_: Any,
) -> Tensor:  # fmt: skip
    """What the plan was made for, in place of a plan."""
    made_for = torch.tensor([batch_size, max_seqlen_q], dtype=torch.int32)
    return torch.cat([made_for, cache_seqlens[:batch_size].int()])


def install() -> None:
    """Takes the place of `vllm.vllm_flash_attn`, whose libraries the CPU build lacks."""
    name = "vllm.vllm_flash_attn"
    package, interface = types.ModuleType(name), types.ModuleType(f"{name}.flash_attn_interface")
    package.__path__ = []
    for module in (package, interface):
        module.flash_attn_varlen_func = flash_attn_varlen_func
        module.get_scheduler_metadata = get_scheduler_metadata
        module.compile_flash_attn_varlen_func_from_specs = None
        module.is_fa_version_supported = lambda version, *_: version in _VERSIONS
        module.fa_version_unsupported_reason = lambda version, *_: (
            None if version in _VERSIONS else "it is not one of the stand-in's"
        )
        module.FA2_AVAILABLE = module.FA3_AVAILABLE = True
    package.flash_attn_interface = interface
    sys.modules[name], sys.modules[f"{name}.flash_attn_interface"] = package, interface
