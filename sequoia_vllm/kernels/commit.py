# mypy: allow-untyped-defs
"""Commit in Triton: the accepted path's keys and values move behind the root.

Node j of a request with c committed tokens before the root has its keys and values
in cache position c + j. The accepted node of depth d belongs in position c + d.
One launch moves all of them in all layers, byte by byte whatever the dtype.

Indices rise along a path faster than depths do, so a move's source is never a position that an
earlier move wrote. A later move may write where an earlier one read. So one program makes all moves
of a piece, in the path's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

_UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
# Units that one program moves per token.
_MAX_BLOCK = 1024


@dataclass(frozen=True)
class CacheLayers:
    """Caches of layers that move their tokens together; from `of`."""

    caches: tuple[Tensor, ...]  # kept alive, since the kernel is given addresses
    addresses: Tensor  # int64 ``[layers]``, on the device
    unit: int  # bytes moved at once, 1 to 8
    heads: int  # rows of a token
    units: int  # units of a row
    slots: int  # tokens per cache block
    block_stride: int  # in units
    head_stride: int  # in units
    slot_stride: int  # in units

    @staticmethod
    def of(caches: Sequence[Tensor]) -> CacheLayers:
        """Prepares the caches of one or more layers; waits for the device.

        Args:
            caches: ``[blocks, heads, slots per block, width]`` of any dtype, all alike, contiguous
                in the last dimension; ``width`` holds key and value of a head. Caches that keep
                these apart are given as two each. A cache given twice is moved once.

        Raises:
            ValueError: There are none, they differ in more than contents, or have another layout.
        """
        # By address: layers may share one cache, whose tokens must move once.
        unique = tuple({cache.data_ptr(): cache for cache in caches}.values())
        if not unique:
            raise ValueError("no caches to move tokens in")
        first = unique[0]
        if first.dim() != 4 or first.stride(3) != 1:
            raise ValueError(
                f"caches must be [blocks, heads, slots, width], contiguous in width:"
                f" {list(first.shape)}, strides {first.stride()}"
            )
        for cache in unique:
            _check_alike(cache, first)
        size = first.element_size()
        lengths = [size * length for length in (first.shape[3], *first.stride()[:3])]
        unit = reduce(gcd, (cache.data_ptr() for cache in unique), gcd(8, *lengths))
        units, *strides = (length // unit for length in lengths)
        addresses = torch.tensor([cache.data_ptr() for cache in unique]).to(first.device)
        return CacheLayers(unique, addresses, unit, first.shape[1], units, first.shape[2], *strides)


def _check_alike(cache: Tensor, first: Tensor) -> None:
    if (cache.dtype, cache.device) != (first.dtype, first.device):
        raise ValueError(f"caches of {first.dtype} on {first.device} and another kind of one")
    # Layers may have different numbers of blocks: only the table says which are used.
    if (cache.shape[1:], cache.stride()) != (first.shape[1:], first.stride()):
        raise ValueError(
            f"caches differ in layout: {list(first.shape)}, strides {first.stride()};"
            f" {list(cache.shape)}, strides {cache.stride()}"
        )


@triton.jit
def _token_address(base, table, position, block_stride, slot_stride, SLOTS: tl.constexpr):
    """Where the token of a position begins."""
    block = tl.load(table + position // SLOTS).to(tl.int64)
    return base + block * block_stride + (position % SLOTS).to(tl.int64) * slot_stride


# Trees differ in depth, and views begin anywhere: neither needs another compiled version.
@triton.jit(
    do_not_specialize=["table_stride", "accepted_stride", "depth"],
    do_not_specialize_on_alignment=["addresses", "block_table", "context_lens", "accepted"],
)
def commit_kernel(
    addresses, block_table, table_stride, context_lens, accepted, accepted_stride, depth,
    block_stride, head_stride, slot_stride,
    UNIT: tl.constexpr, SLOTS: tl.constexpr, HEADS: tl.constexpr, UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One piece of every accepted token of one request in one layer."""
    request = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    piece = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    offsets = (piece // UNITS).to(tl.int64) * head_stride + piece % UNITS
    exists = piece < HEADS * UNITS
    base = tl.load(addresses + layer).to(tl.pointer_type(UNIT))
    table = block_table + request * table_stride
    root = tl.load(context_lens + request)
    for step in range(depth):
        node = tl.load(accepted + request * accepted_stride + step)
        if node > step + 1:  # else the path has ended, or the token is in its place
            source = _token_address(base, table, root + node, block_stride, slot_stride, SLOTS)
            place = root + step + 1
            target = _token_address(base, table, place, block_stride, slot_stride, SLOTS)
            tl.store(target + offsets, tl.load(source + offsets, mask=exists), mask=exists)


def commit_accepted(
    layers: CacheLayers, *, block_table: Tensor, context_lens: Tensor, accepted: Tensor
) -> None:
    """Moves the accepted paths of R requests, in all layers, in place.

    Waits for nothing on the device.

    Args:
        block_table: int32 ``[R, max_blocks]``, contiguous in its rows.
        context_lens: int32 ``[R]``: cache position of each root.
        accepted: int32 ``[R, D]``, contiguous in its rows: stored index of the
            accepted node at depth 1, 2, ..., then -1. Indices rise, as a child's is
            above its parent's.

    Raises:
        ValueError: There are not R rows of each.
    """
    requests, depth = accepted.shape
    if {len(block_table), len(context_lens)} != {requests}:
        others = f"{len(block_table)} block tables and {len(context_lens)} context lengths"
        raise ValueError(f"paths of {requests} requests, {others}")
    if requests == 0 or depth == 0:
        return
    pieces = layers.heads * layers.units
    block = min(_MAX_BLOCK, triton.next_power_of_2(pieces))
    grid = (requests, len(layers.addresses), triton.cdiv(pieces, block))
    commit_kernel[grid](
        layers.addresses, block_table, block_table.stride(0), context_lens,
        accepted, accepted.stride(0), depth,
        layers.block_stride, layers.head_stride, layers.slot_stride,
        UNIT=_UNITS[layers.unit], SLOTS=layers.slots, HEADS=layers.heads, UNITS=layers.units,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
