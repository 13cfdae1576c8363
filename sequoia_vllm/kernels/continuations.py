# mypy: allow-untyped-defs
"""What requests' own texts say comes next: `verification.retrieval.continuations` in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.verification.retrieval import LONGEST, SHORTEST, WINDOW

_BLOCK, _WARPS = 1024, 4


def find_continuations(texts: Tensor, slots: Tensor, roots: Tensor, told: Tensor) -> None:
    """Writes what followed the latest of the longest earlier occurrences of each text's end.

    Nothing waits for the device.

    Args:
        texts: int32 ``[slots, L]``: tokens by request slot; contiguous in its rows.
        slots: int64 ``[R]``: request slot of each; -1 for padding, which gets anything.
        roots: int32 ``[R]``: position of each text's last token.
        told: int64 ``[R, D]``, contiguous, written: as `continuations` returns it.
    """
    continuations_kernel[(len(told),)](
        texts, texts.stride(0), texts.shape[1], slots, roots, told, told.shape[1], WINDOW,
        MOST=LONGEST, LEAST=SHORTEST, BLOCK=_BLOCK,
        COLUMNS=triton.next_power_of_2(told.shape[1]), num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["texts_stride", "length", "depth", "window"],
    do_not_specialize_on_alignment=["slots", "roots", "told"],
)
def continuations_kernel(
    texts, texts_stride, length, slots, roots, told, depth, window, MOST: tl.constexpr,
    LEAST: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One request per program; runs of ``LEAST`` to ``MOST`` tokens are matches."""
    request = tl.program_id(0)
    text = texts + tl.maximum(tl.load(slots + request), 0) * texts_stride
    last = tl.minimum(tl.load(roots + request), length - 1)
    first = tl.maximum(last + 1 - window, 0)
    best = first.to(tl.int64)  # of the longest run, the latest place: that decides
    for start in range(first, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_same = place < last
        run = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MOST):
            inside = (place < last) & (place - back >= first)
            token = tl.load(text + place - back, mask=inside, other=-1)
            is_same = is_same & (token == tl.load(text + tl.maximum(last - back, first)))
            run += is_same.to(tl.int64)
        best = tl.maximum(best, tl.max((run << 32) | place.to(tl.int64), axis=0))
    found = (best & 0xFFFFFFFF).to(tl.int32)
    column = tl.arange(0, COLUMNS)
    ahead = tl.minimum(found + 1 + column % tl.maximum(last - found, 1), last)
    token = tl.load(text + ahead, mask=column < depth, other=-1).to(tl.int64)
    token = tl.where(best >= LEAST * 4294967296, token, -1)
    tl.store(told + request.to(tl.int64) * depth + column, token, mask=column < depth)
