# mypy: allow-untyped-defs
"""Inputs of the draft model, in one launch per forward: token ids, positions and cache slots.

A forward of the draft reads committed tokens that it has not read yet, as many as each request has.
Or it reads the nodes of one level of every tree. The rows of a request follow one another.

Trained heads read a committed token together with the target's hidden states at the token before
it. The target's forward has states of all nodes of a tree: those of the accepted path lie
scattered. One launch puts them side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.tree_shapes import request_of, rows_per_slot, search_steps

NO_SLOT = -1
"""In place of a cache slot: keys and values are not kept."""

_NO_SLOT = tl.constexpr(NO_SLOT)
_NO_WINDOW = 1 << 40  # longer than any request
_BLOCK, _STATES_BLOCK = 128, 1024
_MOST_LAYERS = 8
# Triton compiles a kernel again where a number, or an address, becomes a multiple of it.
_ALIGNMENT = 16


def aligned(count: int) -> int:
    """The next multiple of what Triton takes for aligned, from ``count`` up."""
    return triton.cdiv(count, _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class PagedTables:
    """The block tables of a batch, of every group of cache layers; from `of`."""

    tables: tuple[Tensor, ...]  # kept alive, since the kernels are given addresses
    layout: Tensor
    """int64 ``[groups, 5]``, on the device: address of each table, entries from row to row, entries
    of a row, tokens per block, and the sliding window."""

    @staticmethod
    def of(
        tables: Sequence[Tensor],
        block_sizes: Sequence[int],
        windows: Mapping[int, int] | None = None,
    ) -> PagedTables:
        """Prepares tables that stay where they are; waits for the device.

        Args:
            tables: int32 ``[R, max_blocks]`` of each group, contiguous in its rows:
                position p of request r lies in block ``table[r, p // block_size]``.
            block_sizes: Tokens per block of each group.
            windows: Sliding window in tokens, by group; groups without one are absent.

        Raises:
            ValueError: Tables and sizes differ in number, or a table in dtype or layout.
        """
        if len(tables) != len(block_sizes) or not tables:
            raise ValueError(f"{len(tables)} block tables and {len(block_sizes)} block sizes")
        if any(table.dtype != torch.int32 or table.stride(-1) != 1 for table in tables):
            raise ValueError("block tables must be int32 and contiguous in their rows")
        windows = windows or {}
        layout = [
            [table.data_ptr(), table.stride(0), table.shape[1], size, windows.get(i, _NO_WINDOW)]
            for i, (table, size) in enumerate(zip(tables, block_sizes, strict=True))
        ]
        return PagedTables(
            tuple(tables), torch.tensor(layout, dtype=torch.int64, device=tables[0].device)
        )


@dataclass(frozen=True)
class DraftInputs:
    """Buffers for the rows of one forward; they stay in place, so CUDA graphs may hold them.

    Each method fills in the rows of the first R requests of a `DraftBatch`. Of requests that are
    not there, whose slot is below 0, rows have no cache slot, and token 0 or a mask. A position for
    the model is at most ``longest - 1``. Positions from ``max_len`` on have no cache slot.
    """

    tables: PagedTables  # where requests have their cache blocks
    all_token_ids: Tensor
    """int32 ``[request slots, max_len]``, contiguous in its rows: committed tokens."""
    longest: int  # positions that the model was made for
    token_ids: Tensor  # int32 ``[rows]``
    positions: Tensor  # int64 ``[rows]``: for the model
    slots: Tensor  # int64 ``[groups, rows]``: where keys and values go; `NO_SLOT`: nowhere

    @staticmethod
    def empty(tables: PagedTables, rows: int, all_token_ids: Tensor, longest: int) -> DraftInputs:
        """Room for forwards of up to so many rows."""

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=tables.layout.device)

        # Every group's slots begin as aligned as the first's.
        slots = buffer(len(tables.tables), aligned(rows))
        token_ids = buffer(rows, dtype=torch.int32)
        return DraftInputs(tables, all_token_ids, longest, token_ids, buffer(rows), slots)

    @property
    def max_len(self) -> int:
        """Longest request of the engine."""
        return self.all_token_ids.shape[1]

    def read_committed(self, batch: Any, num_reqs: int, num_rows: int) -> None:
        """Committed tokens of each request that follow; rows up to ``num_rows`` are padding.

        Row ``first_rows[r] + j`` is position ``starts[r] + j``, with the token that is
        ``state_offset`` positions further on. Padding is token 0 at position 0 without a slot.

        Tokens that no later token's sliding window reaches have no slot in its group: vLLM frees a
        block when the target is past it, also where the draft has not read it yet. The block may
        already belong to another request.
        """
        committed_inputs_kernel[self._grid(num_rows, num_reqs)](
            batch.slots, batch.starts, batch.first_rows, batch.computed_before, self.all_token_ids,
            self.all_token_ids.stride(0), self.max_len, num_reqs, search_steps(num_reqs), num_rows,
            self.longest, batch.state_offset, *self._written, **self._constants,
        )  # fmt: skip

    def read_level(self, batch: Any, num_reqs: int, level: Any, tokens: Tensor) -> None:
        """The m nodes of a `Level` of each request's tree.

        The j-th of them belongs in the cache ``level.first + j`` after ``contexts``.

        Args:
            tokens: int64 ``[>= R, N]``, contiguous in its rows: drafted tokens by node.
        """
        width, nodes = level.width, level.nodes
        level_inputs_kernel[self._grid(num_reqs * width, num_reqs)](
            batch.slots, batch.contexts, tokens, tokens.stride(0), nodes, rows_per_slot(nodes, 1),
            level.first, level.depth, width, num_reqs * width, self.max_len, self.longest,
            *self._written, **self._constants,
        )  # fmt: skip

    def read_block(self, batch: Any, num_reqs: int, width: int, mask_token: int) -> None:
        """``width`` rows of each request: its root, from ``roots`` on, then masks."""
        block_inputs_kernel[self._grid(num_reqs * width, num_reqs)](
            batch.slots, batch.roots, self.all_token_ids, self.all_token_ids.stride(0), mask_token,
            width, num_reqs * width, self.max_len, self.longest, *self._written, **self._constants,
        )  # fmt: skip

    def _grid(self, rows: int, requests: int) -> tuple[int]:
        if rows > len(self.token_ids):
            raise ValueError(
                f"{rows} rows of {requests} requests do not fit buffers for"
                f" {len(self.token_ids)} rows"
            )
        return (triton.cdiv(rows, _BLOCK),)

    @property
    def _written(self) -> tuple[Any, ...]:
        """The last arguments of each kernel."""
        return self.tables.layout, self.token_ids, self.positions, self.slots, self.slots.stride(0)

    @property
    def _constants(self) -> dict[str, int]:
        return {"GROUPS": len(self.slots), "BLOCK": _BLOCK, "num_warps": 4}


@triton.jit
def _store_slots(
    slots, slots_stride, row, exists, layout, request, position, reached, has_slot,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Each row's cache slot in each group, as `BlockTables.compute_slot_mappings` has it.

    A position has none in a group whose window, if it ended at ``reached``, would be past it.
    """
    for group in tl.static_range(GROUPS):
        table = tl.load(layout + 5 * group).to(tl.pointer_type(tl.int32))
        table_stride = tl.load(layout + 5 * group + 1)
        table_width = tl.load(layout + 5 * group + 2)
        block_size = tl.load(layout + 5 * group + 3).to(tl.int32)
        window = tl.load(layout + 5 * group + 4)
        entry = position // block_size
        has_block = has_slot & (entry < table_width) & (position > reached - window)
        block = tl.load(
            table + request.to(tl.int64) * table_stride + entry, mask=has_block, other=0
        )
        slot = block.to(tl.int64) * block_size + position % block_size
        tl.store(
            slots + group * slots_stride + row, tl.where(has_block, slot, _NO_SLOT), mask=exists
        )


@triton.jit(
    do_not_specialize=["max_len", "num_requests", "steps", "num_rows", "longest", "state_offset"]
)
def committed_inputs_kernel(
    requests, starts, first_rows, computed_before, all_token_ids, ids_stride, max_len, num_requests,
    steps, num_rows, longest, state_offset, layout, token_ids, positions, slots, slots_stride,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of committed tokens. Arguments as in `DraftInputs.read_committed`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    request = request_of(first_rows, row, num_requests, steps)
    is_read = exists & (request < num_requests)
    offset = row - tl.load(first_rows + request, mask=is_read, other=0)
    start = tl.load(starts + request, mask=is_read, other=0)
    position = tl.where(is_read, start + offset, 0)
    state = tl.load(requests + request, mask=is_read, other=-1)
    is_token = (state >= 0) & (position + state_offset < max_len)
    source = all_token_ids + state * ids_stride + position + state_offset
    token = tl.load(source, mask=is_token, other=0)
    tl.store(token_ids + row, token, mask=exists)
    tl.store(positions + row, tl.minimum(position, longest - 1).to(tl.int64), mask=exists)
    before = tl.load(computed_before + request, mask=is_read, other=0)
    _store_slots(
        slots, slots_stride, row, exists, layout, request, position, before, is_token, GROUPS
    )


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
    _store_slots(
        slots, slots_stride, row, exists, layout, request, cached, cached, has_slot, GROUPS
    )


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
    _store_slots(
        slots, slots_stride, row, exists, layout, request, position, position, has_slot, GROUPS
    )


def gather_target_states(
    layers: Sequence[Tensor],
    *,
    query_start_loc: Tensor,
    accepted: Tensor | None,
    first_rows: Tensor,
    states: Tensor,
) -> None:
    """Copies rows of every layer's states into one row each.

    Row ``first_rows[r] + j`` belongs to token j of what request r has in this step. A request with
    a tree has the root, and then the accepted nodes by depth; another has its tokens in order.
    Tokens past the accepted ones get the root's states. Rows of no request get the first row's.

    Args:
        layers: ``[T, H]`` of each of L layers, contiguous in their rows: the target's states.
        query_start_loc, first_rows: int32 ``[R + 1]``: first row of each request in T, and among
            those of ``states``, then the end.
        accepted: int32 ``[R', D]``, contiguous in its rows: accepted nodes of the first R'
            requests, which have trees, by depth, then -1. None: none has.
        states: ``[rows, L * H]``, written.

    Raises:
        ValueError: The layers are none, too many, or not alike.
    """
    if not 0 < len(layers) <= _MOST_LAYERS:
        raise ValueError(f"states of {len(layers)} layers: 1 to {_MOST_LAYERS} can be gathered")
    first = layers[0]
    if any(layer.stride() != first.stride() or layer.dtype != first.dtype for layer in layers):
        raise ValueError("the layers' states differ in dtype or layout")
    rows, hidden, requests = len(states), first.shape[1], len(first_rows) - 1
    if not rows:
        return
    trees, depth, stride = 0, 0, 0
    if accepted is not None:
        (trees, depth), stride = accepted.shape, accepted.stride(0)
    pointers = [*layers, *[first] * (_MOST_LAYERS - len(layers))]
    gather_target_states_kernel[(rows, triton.cdiv(hidden, _BLOCK))](
        *pointers, first.stride(0), query_start_loc, requests, search_steps(requests),
        query_start_loc if accepted is None else accepted, stride, trees, depth,
        first_rows, states, states.stride(0), hidden,
        LAYERS=len(layers), BLOCK=_STATES_BLOCK, num_warps=4,
    )  # fmt: skip


# Paths begin after a column of counts; where nobody has a tree there are none.
@triton.jit(
    do_not_specialize=["num_requests", "steps", "accepted_stride", "trees", "depth"],
    do_not_specialize_on_alignment=["accepted"],
)
def gather_target_states_kernel(
    layer_0, layer_1, layer_2, layer_3, layer_4, layer_5, layer_6, layer_7, layer_stride,
    query_start_loc, num_requests, steps, accepted, accepted_stride, trees, depth,
    first_rows, states, states_stride, hidden,
    LAYERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of one row per program. Arguments as in `gather_target_states`."""
    row = tl.program_id(0)
    request = request_of(first_rows, row, num_requests, steps)
    is_there = request < num_requests
    offset = row - tl.load(first_rows + request)
    offset = tl.where(is_there, offset, 0)
    on_path = is_there & (request < trees) & (offset > 0)
    path = accepted + request * accepted_stride
    node = tl.load(path + offset - 1, mask=on_path & (offset <= depth), other=-1)
    step = tl.where(on_path, tl.maximum(node, 0), offset)
    start = tl.load(query_start_loc + request, mask=is_there, other=0)
    end = tl.load(query_start_loc + request + 1, mask=is_there, other=1)
    source = tl.where(start + step < end, start + step, start).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    target = states + row.to(tl.int64) * states_stride + column
    for layer in tl.static_range(LAYERS):
        if layer == 0:
            pointer = layer_0
        elif layer == 1:
            pointer = layer_1
        elif layer == 2:
            pointer = layer_2
        elif layer == 3:
            pointer = layer_3
        elif layer == 4:
            pointer = layer_4
        elif layer == 5:
            pointer = layer_5
        elif layer == 6:
            pointer = layer_6
        else:
            pointer = layer_7
        values = tl.load(pointer + source * layer_stride + column, mask=inside)
        tl.store(target + layer * hidden, values, mask=inside)
