# mypy: allow-untyped-defs
"""Inputs of the draft model, in one launch per forward: token ids, positions and cache slots.

A forward of the draft reads the same number of rows of every request. They are committed tokens
that it has not read yet, or the nodes of one level of its tree. The rows of a request follow one
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.tree_shapes import rows_per_slot

NO_SLOT = -1
"""In place of a cache slot: keys and values are not kept."""

_NO_SLOT = tl.constexpr(NO_SLOT)
_BLOCK = 128
# Triton compiles a kernel again where a number, or an address, becomes a multiple of it.
_ALIGNMENT = 16


def aligned(count: int) -> int:
    """The next multiple of what Triton takes for aligned, from ``count`` up."""
    return triton.cdiv(count, _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class PagedTables:
    """The block tables of a batch, of every group of cache layers; from `of`.

    Attributes:
        tables: Kept alive, since the kernels are given addresses.
        layout: int64 ``[groups, 4]``, on the device: address of each table, entries
            from row to row, entries of a row, and tokens per block.
    """

    tables: tuple[Tensor, ...]
    layout: Tensor

    @staticmethod
    def of(tables: Sequence[Tensor], block_sizes: Sequence[int]) -> PagedTables:
        """Prepares tables that stay where they are; waits for the device.

        Args:
            tables: int32 ``[R, max_blocks]`` of each group, contiguous in its rows:
                position p of request r lies in block ``table[r, p // block_size]``.
            block_sizes: Tokens per block of each group.

        Raises:
            ValueError: If there is not one block size per table, or a table is of
                another dtype or layout.
        """
        if len(tables) != len(block_sizes) or not tables:
            raise ValueError(f"{len(tables)} block tables and {len(block_sizes)} block sizes")
        if any(table.dtype != torch.int32 or table.stride(-1) != 1 for table in tables):
            raise ValueError("block tables must be int32 and contiguous in their rows")
        layout = [
            [table.data_ptr(), table.stride(0), table.shape[1], size]
            for table, size in zip(tables, block_sizes, strict=True)
        ]
        return PagedTables(
            tuple(tables), torch.tensor(layout, dtype=torch.int64, device=tables[0].device)
        )


@dataclass(frozen=True)
class DraftInputs:
    """Buffers for the rows of one forward; they stay in place, so CUDA graphs may hold them.

    Attributes:
        tables: Where requests have their cache blocks.
        token_ids: int32 ``[rows]``.
        positions: int64 ``[rows]``: for the model; at most the longest it was made for.
        slots: int64 ``[groups, rows]``: where keys and values go; `NO_SLOT`: nowhere.
        last_rows: int64 ``[max_requests]``: of each request, the row of the last
            committed token (see `read_committed`).
    """

    tables: PagedTables
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    last_rows: Tensor

    @staticmethod
    def empty(tables: PagedTables, rows: int, max_requests: int) -> DraftInputs:
        """Room for forwards of up to so many rows and requests."""

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=tables.layout.device)

        return DraftInputs(
            tables=tables,
            token_ids=buffer(rows, dtype=torch.int32),
            positions=buffer(rows),
            # Every group's slots begin as aligned as the first's.
            slots=buffer(len(tables.tables), aligned(rows)),
            last_rows=buffer(max_requests),
        )

    def read_committed(
        self,
        *,
        requests: Tensor,
        starts: Tensor,
        counts: Tensor,
        all_token_ids: Tensor,
        width: int,
        longest: int,
        state_offset: int = 0,
    ) -> None:
        """Fills in ``width`` rows for each of R requests: committed tokens that follow.

        Row ``r * width + j`` is position ``starts[r] + j`` if ``j < counts[r]``, with the
        token that is ``state_offset`` positions further on. Other rows are padding: token 0
        without a slot. Rows of absent requests are padding, too. ``last_rows`` gets each
        request's last row that is no padding.

        Args:
            requests: int64 ``[R]``: row of each in ``all_token_ids``; below 0: not there.
            starts, counts: int32 ``[R]``.
            all_token_ids: int32 ``[S, max_len]``, contiguous in its rows.
            width: Rows per request.
            longest: Positions that the model was made for.
            state_offset: The hidden-state offset, see `begin_drafting_kernel`.
        """
        num_rows = len(requests) * width
        self._check(num_rows, len(requests))
        committed_inputs_kernel[(triton.cdiv(num_rows, _BLOCK),)](
            requests, starts, counts, all_token_ids, all_token_ids.stride(0),
            all_token_ids.shape[1], width, num_rows, longest, state_offset,
            self.tables.layout, self.token_ids, self.positions, self.slots, self.slots.stride(0),
            self.last_rows, GROUPS=len(self.slots), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip

    def read_level(
        self,
        *,
        requests: Tensor,
        contexts: Tensor,
        tokens: Tensor,
        nodes: Tensor,
        first: int,
        depth: int,
        max_len: int,
        longest: int,
    ) -> None:
        """Fills in m rows for each of R requests: the drafted nodes of one level.

        Args:
            requests: int64 ``[R]``: below 0: not there; its rows are token 0 without a slot.
            contexts: int32 ``[R]``: where each root is in the draft's cache.
            tokens: int64 ``[R, N]``, contiguous in its rows: drafted tokens by node.
            nodes: int32 ``[m]``: columns of these in ``tokens``; or ``[S, m]``, by ``requests``.
            first: Node j of the level belongs in the cache ``first + j`` after the root.
            depth: Depth of all m nodes.
            max_len: There are no cache slots from this position on.
            longest: Positions that the model was made for.
        """
        width = nodes.shape[-1]
        num_rows = len(requests) * width
        self._check(num_rows, len(requests))
        level_inputs_kernel[(triton.cdiv(num_rows, _BLOCK),)](
            requests, contexts, tokens, tokens.stride(0), nodes, rows_per_slot(nodes, 1), first,
            depth, width, num_rows, max_len, longest,
            self.tables.layout, self.token_ids, self.positions, self.slots, self.slots.stride(0),
            GROUPS=len(self.slots), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip

    def read_block(
        self,
        *,
        requests: Tensor,
        roots: Tensor,
        all_token_ids: Tensor,
        width: int,
        mask_token: int,
        max_len: int,
        longest: int,
    ) -> None:
        """Fills in ``width`` rows for each of R requests: its root, then masks.

        Args:
            requests: int64 ``[R]``: row of each in ``all_token_ids``; below 0: not there; its
                rows are masks without a slot.
            roots: int32 ``[R]``: position of each root; others follow it.
            all_token_ids: int32 ``[S, max_len]``, contiguous in its rows.
            width: Rows per request.
            mask_token: Token of all rows but the roots'.
            max_len: There are no cache slots from this position on.
            longest: Positions that the model was made for.
        """
        num_rows = len(requests) * width
        self._check(num_rows, len(requests))
        block_inputs_kernel[(triton.cdiv(num_rows, _BLOCK),)](
            requests, roots, all_token_ids, all_token_ids.stride(0), mask_token, width, num_rows,
            max_len, longest,
            self.tables.layout, self.token_ids, self.positions, self.slots, self.slots.stride(0),
            GROUPS=len(self.slots), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip

    def _check(self, rows: int, requests: int) -> None:
        if rows > len(self.token_ids) or requests > len(self.last_rows):
            raise ValueError(
                f"{rows} rows of {requests} requests do not fit buffers for"
                f" {len(self.token_ids)} rows of {len(self.last_rows)}"
            )


@triton.jit
def _store_slots(
    slots, slots_stride, row, exists, layout, request, position, has_slot, GROUPS: tl.constexpr
):
    """Each row's cache slot in each group, as `BlockTables.compute_slot_mappings` has it."""
    for group in tl.static_range(GROUPS):
        table = tl.load(layout + 4 * group).to(tl.pointer_type(tl.int32))
        table_stride = tl.load(layout + 4 * group + 1)
        table_width = tl.load(layout + 4 * group + 2)
        block_size = tl.load(layout + 4 * group + 3).to(tl.int32)
        entry = position // block_size
        has_block = has_slot & (entry < table_width)
        block = tl.load(
            table + request.to(tl.int64) * table_stride + entry, mask=has_block, other=0
        )
        slot = block.to(tl.int64) * block_size + position % block_size
        tl.store(
            slots + group * slots_stride + row, tl.where(has_block, slot, _NO_SLOT), mask=exists
        )


@triton.jit(do_not_specialize=["max_len", "width", "num_rows", "longest", "state_offset"])
def committed_inputs_kernel(
    requests, starts, counts, all_token_ids, ids_stride, max_len, width, num_rows, longest,
    state_offset, layout, token_ids, positions, slots, slots_stride, last_rows,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of committed tokens. Arguments as in `DraftInputs.read_committed`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    request, offset = row // width, row % width
    state = tl.load(requests + request, mask=exists, other=-1)
    count = tl.load(counts + request, mask=exists, other=0)
    position = tl.load(starts + request, mask=exists, other=0) + offset
    is_token = (state >= 0) & (offset < count) & (position + state_offset < max_len)
    source = all_token_ids + state * ids_stride + position + state_offset
    token = tl.load(source, mask=is_token, other=0)
    tl.store(token_ids + row, token, mask=exists)
    tl.store(positions + row, tl.minimum(position, longest - 1).to(tl.int64), mask=exists)
    last = request * width + tl.maximum(count - 1, 0)
    tl.store(last_rows + request, last.to(tl.int64), mask=exists & (offset == 0))
    _store_slots(slots, slots_stride, row, exists, layout, request, position, is_token, GROUPS)


@triton.jit(
    do_not_specialize=["slot_rows", "first", "depth", "width", "num_rows", "max_len", "longest"]
)
def level_inputs_kernel(
    requests, contexts, tokens, tokens_stride, nodes, slot_rows, first, depth, width, num_rows,
    max_len, longest, layout, token_ids, positions, slots, slots_stride,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of one level's nodes. Arguments as in `DraftInputs.read_level`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    request, place = row // width, row % width
    slot = tl.load(requests + request, mask=exists, other=-1)
    is_there = slot >= 0
    node = tl.load(nodes + slot * slot_rows + place, mask=is_there, other=0)
    token = tl.load(tokens + request.to(tl.int64) * tokens_stride + node, mask=is_there, other=0)
    tl.store(token_ids + row, token.to(tl.int32), mask=exists)
    root = tl.load(contexts + request, mask=exists, other=0)
    position = tl.minimum(root + depth, longest - 1)
    tl.store(positions + row, position.to(tl.int64), mask=exists)
    cached = root + first + place
    has_slot = is_there & (cached < max_len)
    _store_slots(slots, slots_stride, row, exists, layout, request, cached, has_slot, GROUPS)


@triton.jit(do_not_specialize=["mask_token", "width", "num_rows", "max_len", "longest"])
def block_inputs_kernel(
    requests, roots, all_token_ids, ids_stride, mask_token, width, num_rows, max_len, longest,
    layout, token_ids, positions, slots, slots_stride,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of one block per request. Arguments as in `DraftInputs.read_block`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    request, offset = row // width, row % width
    state = tl.load(requests + request, mask=exists, other=-1)
    root = tl.load(roots + request, mask=exists, other=0)
    is_root = (state >= 0) & (offset == 0) & (root < max_len)
    token = tl.load(all_token_ids + state * ids_stride + root, mask=is_root, other=0)
    tl.store(token_ids + row, tl.where(is_root, token, mask_token), mask=exists)
    position = root + offset
    tl.store(positions + row, tl.minimum(position, longest - 1).to(tl.int64), mask=exists)
    has_slot = (state >= 0) & (position < max_len)
    _store_slots(slots, slots_stride, row, exists, layout, request, position, has_slot, GROUPS)
