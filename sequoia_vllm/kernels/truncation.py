# mypy: allow-untyped-defs
"""A request's min-p, top-k and top-p on the draft's side: Q leans into the nucleus.

Why, and why tokens outside are lowered instead of excluded, is said in
`sequoia_vllm.verification.truncation`. Here one launch per level finds where each row's
nucleus ends, by narrowing down that logit without sorting; the kernels that draw children
lower what is below. The nucleus may take in tokens that are less than `RESOLUTION` below
its end, and it ends `RANGE` below the best token at the latest: any Q is lossless.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels import modes as _modes

LOWERED_BY = 4.0
"""Scaled logits outside the nucleus are lowered by this."""
RANGE = 20.48
"""Scaled logits further below the best one have 1e-9 of its weight."""
_PIVOTS, _PASSES = 8, 4
RESOLUTION = RANGE / _PIVOTS**_PASSES
"""Of scaled logits: half a percent of a token's weight."""
_LOWERED_BY, _RANGE = tl.constexpr(LOWERED_BY), tl.constexpr(RANGE)
_SAMPLED, _MATCHED = tl.constexpr(_modes.SAMPLED), tl.constexpr(_modes.MATCHED)
_BLOCK, _NUM_WARPS = 1024, 8


def lowest_inside(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    modes: Tensor,
    found: Tensor,
) -> None:
    """The lowest raw logit in the nucleus of each of m rows of R requests.

    Waits for nothing on the device; a program of a request without such parameters ends
    after reading them.

    Args:
        logits: ``[R * m, V]``, float32, bfloat16 or float16, contiguous in its rows; the m
            rows of a request follow one another.
        temperature: float32 ``[R]``; above 0 where SAMPLED or MATCHED.
        top_k: int32 ``[R]``; V or more: not used.
        top_p: float32 ``[R]``; 1: not used.
        min_p: float32 ``[R]``; 0: not used.
        modes: int32 ``[R]``, of `sequoia_vllm.kernels.modes`.
        found: float32 ``[R * m]``, written: -inf where all is inside, and where a request
            is neither SAMPLED nor MATCHED.
    """
    rows, vocabulary = logits.shape
    lowest_inside_kernel[(rows,)](
        logits, logits.stride(0), temperature, top_k, top_p, min_p, modes,
        rows // len(modes), vocabulary, found,
        BLOCK=_BLOCK, PIVOTS=_PIVOTS, PASSES=_PASSES, num_warps=_NUM_WARPS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "modes", "found"],
)
def lowest_inside_kernel(
    logits, logits_stride, temperature, top_k, top_p, min_p, modes, width, vocabulary, found,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """One row per program. Arguments as in `lowest_inside`."""
    row = tl.program_id(0)
    request = row // width
    mode = tl.load(modes + request)
    k, p = tl.load(top_k + request), tl.load(top_p + request)
    floor = tl.load(min_p + request)
    cuts = (k < vocabulary) | (p < 1.0) | (floor > 0.0)
    lowest = tl.full([], float("-inf"), tl.float32)
    if ((mode == _SAMPLED) | (mode == _MATCHED)) & cuts:
        own = logits + row.to(tl.int64) * logits_stride
        own_temperature = tl.load(temperature + request)
        inverse = tl.div_rn(1.0, own_temperature)
        maximum = _largest(own, vocabulary, BLOCK)
        # How far below the best one the nucleus ends, in scaled logits, if it does.
        ends = floor > 0.0
        reach = tl.where(ends, tl.minimum(-tl.log(tl.maximum(floor, 1e-30)), _RANGE), _RANGE)
        if k < vocabulary:
            nearer, enough = _narrow(
                own, maximum, inverse, vocabulary, reach, k.to(tl.float32), False, BLOCK, PIVOTS,
                PASSES,
            )  # fmt: skip
            reach = tl.where(enough, nearer, reach)
            ends |= enough
        if p < 1.0:
            # The share is of what is left; of all of the row, unless it ended before.
            counted = tl.where(ends, reach, float("inf")) + tl.zeros([PIVOTS], tl.float32)
            left = tl.max(
                _sums(own, maximum, inverse, vocabulary, counted, True, BLOCK, PIVOTS), axis=0
            )
            nearer, enough = _narrow(
                own, maximum, inverse, vocabulary, reach, p * left, True, BLOCK, PIVOTS, PASSES
            )
            reach = tl.where(enough, nearer, reach)
            ends |= enough
        if ends:
            lowest = maximum - reach * own_temperature
    tl.store(found + row, lowest)


@triton.jit
def lower_outside(logits, lowest, temperature):
    """Raw logits, of the same type, with those below ``lowest`` lowered.

    One expression for all who ask, so that they agree to the bit.
    """
    raw = logits.to(tl.float32)
    return tl.where(raw < lowest, raw - _LOWERED_BY * temperature, raw).to(logits.dtype)


@triton.jit
def _largest(row, vocabulary, BLOCK: tl.constexpr):
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        raw = tl.load(row + token, mask=token < vocabulary, other=float("-inf"))
        maximum = tl.maximum(maximum, raw.to(tl.float32))
    return tl.max(maximum, axis=0)


@triton.jit
def _narrow(
    row, maximum, inverse, vocabulary, reach, wanted, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """How near to the best one there is as much as wanted, and whether there is within reach.

    Rounded up to a ``PIVOTS**PASSES``-th of the reach. ``wanted`` are tokens, or their
    weights: 1 for the best one.
    """
    nearest = tl.zeros([], tl.float32)
    width = reach
    enough = maximum == maximum
    for _ in range(PASSES):
        width = width / PIVOTS
        pivots = nearest + width * (tl.arange(0, PIVOTS) + 1).to(tl.float32)
        sums = _sums(row, maximum, inverse, vocabulary, pivots, WEIGHTS, BLOCK, PIVOTS)
        too_near = tl.sum((sums < wanted).to(tl.int32), axis=0)
        enough &= too_near < PIVOTS
        nearest += width * tl.minimum(too_near, PIVOTS - 1).to(tl.float32)
    return nearest + width, enough


@triton.jit
def _sums(
    row, maximum, inverse, vocabulary, pivots, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """Tokens, or their weights, that are no further below the best one than each pivot."""
    sums = tl.zeros([PIVOTS, BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        raw = tl.load(row + token, mask=token < vocabulary, other=float("-inf"))
        below = (maximum - raw.to(tl.float32)) * inverse
        weights = tl.exp(-below) if WEIGHTS else tl.where(token < vocabulary, 1.0, 0.0)
        sums += tl.where(below[None, :] <= pivots[:, None], weights[None, :], 0.0)
    return tl.sum(sums, axis=1)
