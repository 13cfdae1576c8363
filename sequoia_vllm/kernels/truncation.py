# mypy: allow-untyped-defs
"""A request's min-p, top-k and top-p on the draft's side: Q leans into the nucleus.

The reasons are in `sequoia_vllm.verification.sampling`, also why tokens outside are lowered and not
excluded. Here two launches per level find where each row's nucleus ends, without sorting: in blocks
of the vocabulary they count tokens by their distance from the best one. The kernels that draw
children lower the tokens below that end. It is known to a `RESOLUTION`, with all tokens of one bin
weighed alike, and is `RANGE` below the best token at the latest: any Q is lossless.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels import modes as _modes
from sequoia_vllm.verification.sampling import LOWERED_BY

RANGE = 20.48
"""Scaled logits further below the best one have 1e-9 of its weight."""
_BINS = 128
RESOLUTION = RANGE / _BINS
"""Width of a bin, in scaled logits."""
_LOWERED_BY, _RESOLUTION = tl.constexpr(LOWERED_BY), tl.constexpr(RESOLUTION)
_SAMPLED, _SEEDED = tl.constexpr(_modes.SAMPLED), tl.constexpr(_modes.SEEDED)
_BLOCK, _COUNTING_WARPS, _MERGING_WARPS = 8192, 8, 4
# Bins are numbered from a scaled logit of 0; no number is further from it.
_FURTHEST_BIN = tl.constexpr(1.0e9)


def workspace_size(rows: int, vocabulary: int) -> int:
    """Number of int32 that `lowest_inside` needs: for each block its highest bin and its counts."""
    return rows * triton.cdiv(vocabulary, _BLOCK) * (1 + _BINS)


def lowest_inside(logits: Tensor, batch: Any, width: int, found: Tensor, workspace: Tensor) -> None:
    """The lowest raw logit in the nucleus of each of m rows of R requests.

    Waits for nothing on the device. Programs of a request without such parameters end early.

    Args:
        logits: ``[R * m, V]``, float32, bfloat16 or float16, contiguous in its rows; the m
            rows of a request follow one another.
        batch: A `DraftBatch`, whose temperature is above 0 where SAMPLED or SEEDED. Top-k of V or
            more, top-p of 1 and min-p of 0 are not used.
        width: m.
        found: float32 ``[R * m]``, written: -inf where all is inside, and in other modes.
        workspace: int32, `workspace_size` of it.
    """
    rows, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, _BLOCK)
    own = batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.modes, width, vocabulary
    count_bins_kernel[(rows, num_blocks)](
        logits, logits.stride(0), *own, workspace, BLOCK=_BLOCK, BINS=_BINS,
        num_warps=_COUNTING_WARPS,
    )  # fmt: skip
    lowest_inside_kernel[(rows,)](
        *own, workspace, num_blocks, found, BINS=_BINS,
        BLOCKS=triton.next_power_of_2(num_blocks), num_warps=_MERGING_WARPS,
    )  # fmt: skip


_ANYWHERE = ["temperature", "top_k", "top_p", "min_p", "modes", "counts", "found"]


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=_ANYWHERE)
def count_bins_kernel(
    logits, logits_stride, temperature, top_k, top_p, min_p, modes, width, vocabulary, counts,
    BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """A block of a row per program: its highest bin, and the tokens of that and lower ones."""
    row, block = tl.program_id(0), tl.program_id(1)
    if _cuts(top_k, top_p, min_p, modes, row // width, vocabulary):
        inverse = tl.div_rn(1.0, tl.load(temperature + row // width)) * (1.0 / _RESOLUTION)
        token = block * BLOCK + tl.arange(0, BLOCK)
        raw = tl.load(
            logits + row.to(tl.int64) * logits_stride + token, mask=token < vocabulary,
            other=float("-inf"),
        ).to(tl.float32)  # fmt: skip
        bin = tl.floor(tl.where(raw == raw, raw, float("-inf")) * inverse)
        highest = tl.max(bin, axis=0)
        highest = tl.minimum(tl.maximum(highest, -_FURTHEST_BIN), _FURTHEST_BIN)
        below = highest - bin
        # Tokens too far down, and infinite ones, go to a bin that is not kept.
        counted = (below >= 0.0) & (below < BINS)
        below = tl.where(counted, below, BINS).to(tl.int32)
        own = counts + (row.to(tl.int64) * tl.num_programs(1) + block) * (1 + BINS)
        tl.store(own, highest.to(tl.int32))
        place = tl.arange(0, 2 * BINS)
        tl.store(own + 1 + place, tl.histogram(below, 2 * BINS), mask=place < BINS)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=_ANYWHERE)
def lowest_inside_kernel(
    temperature, top_k, top_p, min_p, modes, width, vocabulary, counts, num_blocks, found,
    BINS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row per program. Arguments as in `lowest_inside`."""
    row = tl.program_id(0)
    request = row // width
    lowest = tl.full([], float("-inf"), tl.float32)
    if _cuts(top_k, top_p, min_p, modes, request, vocabulary):
        block = tl.arange(0, BLOCKS)
        own = counts + (row.to(tl.int64) * num_blocks + block) * (1 + BINS)
        highest_of_block = tl.load(own, mask=block < num_blocks, other=-1000000000)
        highest = tl.max(highest_of_block, axis=0)
        bin = tl.arange(0, BINS)
        place = bin[None, :] - (highest - highest_of_block)[:, None]
        tokens = tl.load(
            own[:, None] + 1 + tl.maximum(place, 0),
            mask=(block < num_blocks)[:, None] & (place >= 0), other=0,
        )  # fmt: skip
        tokens = tl.sum(tokens, axis=0).to(tl.float32)

        k, p = tl.load(top_k + request), tl.load(top_p + request)
        floor = tl.load(min_p + request)
        # In vLLM's order. A bin is inside if a token of it may be.
        inside = bin * _RESOLUTION <= -tl.log(tl.maximum(floor, 1e-30))
        ends = floor > 0.0
        before = tl.cumsum(tokens, axis=0) - tokens
        inside = inside & (before < k.to(tl.float32))
        ends = ends | (tl.sum(tokens, axis=0) >= k.to(tl.float32))
        weights = tokens * tl.exp(-(bin.to(tl.float32) + 0.5) * _RESOLUTION)
        kept = tl.where(inside, weights, 0.0)
        before = tl.cumsum(kept, axis=0) - kept
        share = tl.where(p < 1.0, p, 2.0)  # more than there is
        inside = inside & (before < share * tl.sum(kept, axis=0))
        ends = ends | (p < 1.0)
        last = tl.maximum(tl.max(tl.where(inside & (tokens > 0.0), bin, -1), axis=0), 0)
        if ends & (tl.sum(tokens, axis=0) > 0.0):
            end = (highest - last).to(tl.float32) * _RESOLUTION
            # Rounding must not put the best token outside.
            end -= tl.maximum(tl.abs(end) * 1e-6, 0.01 * _RESOLUTION)
            lowest = end * tl.load(temperature + request)
    tl.store(found + row, lowest)


@triton.jit
def _cuts(top_k, top_p, min_p, modes, request, vocabulary):
    """Whether a request is drawn by its sampling parameters, and these exclude tokens."""
    mode = tl.load(modes + request)
    excludes = (tl.load(top_k + request) < vocabulary) | (tl.load(top_p + request) < 1.0)
    excludes = excludes | (tl.load(min_p + request) > 0.0)
    return ((mode == _SAMPLED) | (mode == _SEEDED)) & excludes


@triton.jit
def lower_outside(logits, lowest, temperature):
    """Raw logits, of the same type, with those below ``lowest`` lowered.

    All callers use this one expression, so that they agree to the bit.
    """
    raw = logits.to(tl.float32)
    return tl.where(raw < lowest, raw - _LOWERED_BY * temperature, raw).to(logits.dtype)
