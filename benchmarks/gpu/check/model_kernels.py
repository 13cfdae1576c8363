# mypy: allow-untyped-defs
# ruff: noqa: N803 (Triton's way of writing what is known at compile time)
"""The small operations of a decoder layer, each in one launch, as serving engines have them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normalize_kernel(
    hidden, residual, weight, output, width, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    exists = channel < width
    values = tl.load(residual + row * width + channel, mask=exists, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(hidden + row * width + channel, mask=exists, other=0.0).to(tl.float32)
        stored = values.to(residual.dtype.element_ty)
        tl.store(residual + row * width + channel, stored, mask=exists)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
    factors = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32)
    result = (values * scale * factors).to(output.dtype.element_ty)
    tl.store(output + row * width + channel, result, mask=exists)


def add_and_normalize(hidden: Tensor | None, residual: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of ``residual + hidden``, which is kept in ``residual``; all ``[rows, H]``."""
    output = torch.empty_like(residual)
    rows, width = residual.shape
    _normalize_kernel[(rows,)](
        residual if hidden is None else hidden, residual, weight, output, width, 1e-5,
        ADD=hidden is not None, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return output


@triton.jit
def _rotate_and_store_kernel(
    packed, rotation, positions, slots, cache, block_stride, head_stride, slot_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One head of one row: queries stay where they are, keys and values go to the cache."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    channel = tl.arange(0, PADDED_HALF)
    exists = channel < HALF
    heads = packed + (row * (HEADS + 2 * KEY_HEADS) + head) * HEAD_SIZE
    low = tl.load(heads + channel, mask=exists, other=0.0)
    high = tl.load(heads + HALF + channel, mask=exists, other=0.0)
    if head < HEADS + KEY_HEADS:
        position = tl.load(positions + row)
        cosine = tl.load(rotation + position * HEAD_SIZE + channel, mask=exists, other=0.0)
        sine = tl.load(rotation + position * HEAD_SIZE + HALF + channel, mask=exists, other=0.0)
        first, second = low.to(tl.float32), high.to(tl.float32)
        low = (first * cosine - second * sine).to(packed.dtype.element_ty)
        high = (second * cosine + first * sine).to(packed.dtype.element_ty)
    if head < HEADS:
        target = heads
    else:
        is_value = head >= HEADS + KEY_HEADS
        key_head = tl.where(is_value, head - HEADS - KEY_HEADS, head - HEADS)
        target = cache + (slot // SLOTS) * block_stride + key_head * head_stride
        target += (slot % SLOTS) * slot_stride + tl.where(is_value, HEAD_SIZE, 0)
        exists = channel < tl.where(slot >= 0, HALF, 0)
    tl.store(target + channel, low, mask=exists)
    tl.store(target + HALF + channel, high, mask=exists)


def rotate_and_store(
    packed: Tensor,
    rotation: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    heads: int,
) -> None:
    """Rotary embedding of queries and keys by position; keys and values into the cache.

    Args:
        packed: ``[rows, heads + 2 * kv_heads, D]``, contiguous: queries, keys, values.
        rotation: float32 ``[positions, D]``: cosines, then sines.
        positions, slots: int64 ``[rows]``; keys and values of a row whose slot is below
            0 go nowhere.
        cache: ``[blocks, kv_heads, slots, 2 * D]``.
        heads: Query heads.
    """
    rows, _, head_size = packed.shape
    key_heads, block_size = cache.shape[1:3]
    half = head_size // 2
    _rotate_and_store_kernel[(rows, heads + 2 * key_heads)](
        packed, rotation, positions, slots, cache, *cache.stride()[:3],
        HEADS=heads, KEY_HEADS=key_heads, HEAD_SIZE=head_size, HALF=half,
        PADDED_HALF=triton.next_power_of_2(half), SLOTS=block_size, num_warps=1,
    )  # fmt: skip


@triton.jit
def _gate_kernel(packed, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < width
    gate = tl.load(packed + row * 2 * width + channel, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(packed + row * 2 * width + width + channel, mask=exists, other=0.0)
    result = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(output + row * width + channel, result.to(output.dtype.element_ty), mask=exists)


def silu_and_multiply(packed: Tensor) -> Tensor:
    """``silu(packed[:, :W]) * packed[:, W:]``, ``[rows, W]``."""
    rows, width = packed.shape[0], packed.shape[1] // 2
    output = torch.empty(rows, width, dtype=packed.dtype, device=packed.device)
    block = min(1024, triton.next_power_of_2(width))
    _gate_kernel[(rows, triton.cdiv(width, block))](packed, output, width, BLOCK=block, num_warps=4)
    return output
