# mypy: allow-untyped-defs
"""Writes a step's keys and values into the paged KV cache, in the place of vLLM's kernels for it.

Attention gives positions that a row does not see a weight of 0. Their scores do not matter, but 0
times a value that is NaN or infinite is NaN. So such a value must not reach the cache: a draft that
is rejected would spoil its siblings, and whoever reads its slot later. Where a position's value has
such a number, the value of this key head is written as 0, and its key as NaN. Then the score is
NaN for rows that see the position, as their output is in plain vLLM, and masks hide it from others.

Keys that are not finite beside finite values stay what they are: masks hide their scores, too.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of a key or value that one program holds: sixteen in each of 128 threads.
_NUMBERS = 2048


def write_cache(
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    divides_exactly: bool,
) -> None:
    """Writes the first rows of keys and values to their slots, in one launch.

    Waits for nothing on the device.

    Args:
        keys, values: ``[T or more, H, Dk]`` and ``[T or more, H, Dv]``, with any strides but the
            last, which is 1.
        key_cache, value_cache: ``[blocks, block_size, H, Dk]`` and ``[..., Dv]``, with any strides
            but the last, which is 1; of the dtype of keys, or float8_e4m3fn (uint8 is taken as
            that).
        slots: int64 ``[T]``: block times block size plus place; rows below 0 are not written.
        key_scale, value_scale: float32, one element: an fp8 cache holds keys and values divided by
            these. Not used for other caches.
        divides_exactly: Rounds these quotients as IEEE 754 has it, like vLLM's CUDA operators.
            Otherwise like vLLM's Triton kernels, whose division may be wrong by two units in the
            last place of a float32.
    """
    (_, heads, key_size), value_size = keys.shape, values.shape[2]
    if key_cache.dtype == torch.uint8:
        key_cache = key_cache.view(torch.float8_e4m3fn)
        value_cache = value_cache.view(torch.float8_e4m3fn)
    rows, constants = len(slots) * heads, row_constants(heads, key_size, value_size)
    write_cache_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
        keys, values, key_cache, value_cache, slots, key_scale, value_scale, rows,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        *key_cache.stride()[:3], *value_cache.stride()[:3],
        BLOCK_SIZE=key_cache.shape[1], QUANTIZED=key_cache.dtype == torch.float8_e4m3fn,
        EXACT=divides_exactly, **constants, num_warps=4,
    )  # fmt: skip


@cache  # each layer asks while the device waits
def row_constants(heads: int, key_size: int, value_size: int) -> dict[str, int]:
    """What the kernel is compiled with for rows of these sizes."""
    key_channels, value_channels = map(triton.next_power_of_2, (key_size, value_size))
    return {
        "HEADS": heads, "KEY_SIZE": key_size, "VALUE_SIZE": value_size,
        "KEY_CHANNELS": key_channels, "VALUE_CHANNELS": value_channels,
        "ROWS": max(1, _NUMBERS // max(key_channels, value_channels)),
    }  # fmt: skip


@triton.jit
def _quotients(numbers, scale, EXACT: tl.constexpr):
    """float32: these numbers over one in memory."""
    numbers, scale = numbers.to(tl.float32), tl.load(scale)
    return tl.div_rn(numbers, scale) if EXACT else numbers / scale


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["slots", "key_scale", "value_scale"],
)
def write_cache_kernel(
    keys, values, key_cache, value_cache, slots, key_scale, value_scale, num_rows,
    key_token_stride, key_row_stride, value_token_stride, value_row_stride,
    key_block_stride, key_slot_stride, key_head_stride,
    value_block_stride, value_slot_stride, value_head_stride,
    HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, QUANTIZED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows, which are pairs of a token and a key head, token by token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    slot = tl.load(slots + token, mask=row < num_rows, other=-1).to(tl.int64)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    exists, head = (slot >= 0)[:, None], head.to(tl.int64)
    channel = tl.arange(0, KEY_CHANNELS)[None, :]
    of_value = tl.arange(0, VALUE_CHANNELS)[None, :]
    is_key, is_value = exists & (channel < KEY_SIZE), exists & (of_value < VALUE_SIZE)
    key_rows = keys + (token * key_token_stride + head * key_row_stride)[:, None]
    value_rows = values + (token * value_token_stride + head * value_row_stride)[:, None]
    key = tl.load(key_rows + channel, mask=is_key, other=0.0)
    value = tl.load(value_rows + of_value, mask=is_value, other=0.0)
    if QUANTIZED:
        key, value = _quotients(key, key_scale, EXACT), _quotients(value, value_scale, EXACT)
        is_sound = value == value  # fp8 holds infinities as its largest numbers
    else:
        is_sound = tl.abs(value) < float("inf")
    is_sound = tl.min(is_sound.to(tl.int32), axis=1)[:, None] == 1
    key = tl.where(is_sound, key, float("nan")).to(key_cache.dtype.element_ty)
    value = tl.where(is_sound, value, 0.0).to(value_cache.dtype.element_ty)
    stored = block * key_block_stride + place * key_slot_stride + head * key_head_stride
    tl.store(key_cache + stored[:, None] + channel, key, mask=is_key)
    stored = block * value_block_stride + place * value_slot_stride + head * value_head_stride
    tl.store(value_cache + stored[:, None] + of_value, value, mask=is_value)
