# mypy: allow-untyped-defs
"""Inputs of the target's pass and of the verifier, in one launch each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels import modes as draft_modes
from sequoia_vllm.kernels.draft_inputs import aligned
from sequoia_vllm.kernels.told_branches import _BRANCH
from sequoia_vllm.kernels.tree_shapes import rows_per_slot, shape_row

_BLOCK = 128
_SAMPLED, _SEEDED = tl.constexpr(draft_modes.SAMPLED), tl.constexpr(draft_modes.SEEDED)


def place_nodes(
    batch: Any, shifts: Tensor, positions: Tensor, noted: tuple[Tensor, Tensor] | None = None
) -> None:
    """Moves the nodes of R trees from positions in a row to positions by depth.

    Waits for nothing on the device.

    Args:
        batch: See `gather_for_verification`; here a request's rows are its tree's N nodes at most.
        shifts: int64 ``[N]``, or ``[S, N]`` by slot: depth of each node minus its index.
        positions: int64 ``[tokens]``, or ``[axes, tokens]`` contiguous in its rows: those of
            M-RoPE, which advance together in decoding. Changed in place.
        noted: int32 and int64 ``[>= R]``, written: position of each root, and the slots; left alone
            for requests without nodes. Only for positions of one axis.
    """
    rows, cu_rows = batch.logits_indices, batch.cu_num_logits
    requests, max_nodes = len(cu_rows) - 1, shifts.shape[-1]
    if requests == 0:
        return
    axes = positions.view(-1, positions.shape[-1])
    context_lens, noted_slots = noted or (rows, rows)  # not read
    place_nodes_kernel[(requests, len(axes))](
        rows, cu_rows, batch.idx_mapping, shifts, rows_per_slot(shifts, 1), max_nodes, positions,
        axes.stride(0), context_lens, noted_slots, NOTED=noted is not None,
        BLOCK=min(1024, triton.next_power_of_2(max_nodes)), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slot_rows", "max_nodes", "axis_stride"])
def place_nodes_kernel(
    rows, cu_rows, slots, shifts, slot_rows, max_nodes, positions, axis_stride, context_lens,
    noted_slots, NOTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One request and axis per program. Arguments as in `place_nodes`."""
    request = tl.program_id(0)
    positions += tl.program_id(1).to(tl.int64) * axis_stride
    shifts += shape_row(slots, request, slot_rows)
    first = tl.load(cu_rows + request)
    num_nodes = tl.minimum(tl.load(cu_rows + request + 1) - first, max_nodes)
    for start in range(0, num_nodes, BLOCK):
        node = start + tl.arange(0, BLOCK)
        exists = node < num_nodes
        row = tl.load(rows + first + node, mask=exists, other=0)
        position = tl.load(positions + row, mask=exists, other=0)
        if NOTED:
            root = exists & (node == 0)
            tl.store(context_lens + request + node, position.to(tl.int32), mask=root)
            slot = tl.load(slots + request).to(tl.int64)
            tl.store(noted_slots + request + node, slot, mask=root)
        shift = tl.load(shifts + node, mask=exists, other=0)
        tl.store(positions + row, position + shift, mask=exists & (node > 0))


@dataclass(frozen=True)
class VerifierInputs:
    """Tensors that `gather_for_verification` writes."""

    tokens: Tensor  # int64 ``[T]``: the drafted token of each row; -1: none to accept
    token_ids: Tensor  # int32 ``[T]``: what the target read in each row
    positions: Tensor  # int64 ``[T]``
    modes: Tensor  # int32 ``[R]``, of `sequoia_vllm.kernels.modes`
    root_positions: Tensor  # int32 ``[R]``
    state_rows: Tensor  # int32 ``[R]``: the request's row in what drafting keeps
    temperatures: Tensor  # float32 ``[R]``
    seeds: Tensor  # int64 ``[R]``: of the request's random numbers
    slots: Tensor  # int32 or int64 ``[R]``: request slot of each, as given

    @staticmethod
    def empty(rows: int, slots: Tensor) -> VerifierInputs:
        """Memory for T rows of requests in these R slots."""
        requests, device = len(slots), slots.device
        # Rows of one piece of memory begin where it is aligned.
        int64 = torch.empty(3, aligned(max(rows, requests)), dtype=torch.int64, device=device)
        int32 = torch.empty(5, int64.shape[1], dtype=torch.int32, device=device)
        tokens, positions = int64[:2, :rows]
        modes, root_positions, state_rows, temperatures = int32[1:, :requests]
        return VerifierInputs(
            tokens, int32[0, :rows], positions, modes, root_positions, state_rows,
            temperatures.view(torch.float32), int64[2, :requests], slots,
        )  # fmt: skip

    def part(self, requests: slice, rows: slice) -> VerifierInputs:
        """Inputs of these requests, which have these rows, as views."""
        by_row = ("tokens", "token_ids", "positions")
        own = {name: of[rows if name in by_row else requests] for name, of in vars(self).items()}
        return VerifierInputs(**own)


def gather_for_verification(
    batch: Any,
    *,
    num_nodes: Tensor,
    state_rows: Tensor,
    modes: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    invalid: Tensor | None,
    scored: Tensor,
) -> VerifierInputs:
    """Collects values of T rows of R requests, which lie elsewhere by row and by request slot.

    Waits for nothing on the device.

    Args:
        batch: vLLM's ``InputBatch``: ``logits_indices``, ``expanded_idx_mapping`` and
            ``expanded_local_pos`` ``[T]``, row of each node in the target's pass, its request slot
            and its index in the tree; ``idx_mapping`` ``[R]`` and ``cu_num_logits`` ``[R + 1]``,
            slot and first of the T rows of each request; ``input_ids`` and ``positions``.
        num_nodes: int32 ``[S]``: nodes that were drafted, by request slot; 0: none.
        state_rows, modes, temperatures, seeds: int32, int32, float32 and int64 ``[S]``.
        invalid: bool ``[T]``: rows whose token must not be accepted; or None.
        scored: int32 ``[R]`` with any stride, written: nodes that were drafted and scored; `BRANCH`
            where they are a branch. Such a request's mode is not SAMPLED but SEEDED.
    """
    rows, slots = batch.logits_indices, batch.idx_mapping
    num_rows, requests = len(rows), len(slots)
    inputs = VerifierInputs.empty(num_rows, slots)
    gather_for_verification_kernel[(triton.cdiv(max(num_rows, requests), _BLOCK),)](
        rows, batch.expanded_idx_mapping, batch.expanded_local_pos,
        _nothing(rows.device) if invalid is None else invalid, 0 if invalid is None else num_rows,
        batch.input_ids, batch.positions, slots, batch.cu_num_logits,
        num_nodes, state_rows, modes, temperatures, seeds, num_rows, requests,
        inputs.tokens, inputs.token_ids, inputs.positions,
        inputs.modes, inputs.root_positions, inputs.state_rows, inputs.temperatures, inputs.seeds,
        scored, scored.stride(0), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return inputs


@cache
def _nothing(device: torch.device) -> Tensor:
    """A stand-in for a mask that is not there; it is not read."""
    return torch.zeros(1, dtype=torch.bool, device=device)


@triton.jit(do_not_specialize=["num_invalid", "num_rows", "num_requests", "scored_stride"])
def gather_for_verification_kernel(
    rows, row_slots, row_nodes, invalid, num_invalid, input_ids, positions, slots, cu_rows,
    num_nodes, state_rows, modes, temperatures, seeds, num_rows, num_requests,
    tokens_out, token_ids_out, positions_out,
    modes_out, root_positions_out, state_rows_out, temperatures_out, seeds_out,
    scored, scored_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row and a request per lane. Arguments as in `gather_for_verification` and its batch."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    exists = index < num_rows
    row = tl.load(rows + index, mask=exists, other=0)
    token = tl.load(input_ids + row, mask=exists, other=0)
    drafted = tl.load(num_nodes + tl.load(row_slots + index, mask=exists, other=0), mask=exists)
    is_draft = exists & (tl.load(row_nodes + index, mask=exists, other=0) < drafted)
    excluded = tl.load(invalid + index, mask=index < num_invalid, other=0)
    is_draft = is_draft & (excluded == 0)
    tl.store(tokens_out + index, tl.where(is_draft, token, -1).to(tl.int64), mask=exists)
    tl.store(token_ids_out + index, token, mask=exists)
    tl.store(positions_out + index, tl.load(positions + row, mask=exists, other=0), mask=exists)

    exists = index < num_requests
    slot = tl.load(slots + index, mask=exists, other=0)
    first = tl.load(cu_rows + index, mask=exists, other=0)
    given = tl.load(cu_rows + index + 1, mask=exists, other=0) - first
    drafted = tl.load(num_nodes + slot, mask=exists, other=0)
    state_row = tl.load(state_rows + slot, mask=exists, other=0)
    is_branch = (state_row == _BRANCH) & (tl.minimum(drafted, given) > 1)
    count = tl.where(is_branch, _BRANCH, tl.minimum(drafted, given))
    tl.store(scored + index * scored_stride, count, mask=exists)
    has_root = exists & (first < num_rows)
    root = tl.load(rows + first, mask=has_root, other=0)
    position = tl.load(positions + root, mask=has_root, other=0)
    tl.store(root_positions_out + index, position.to(tl.int32), mask=exists)
    mode = tl.load(modes + slot, mask=exists, other=0)
    mode = tl.where(is_branch & (mode == _SAMPLED), _SEEDED, mode)
    tl.store(modes_out + index, mode, mask=exists)
    tl.store(state_rows_out + index, state_row, mask=exists)
    temperature = tl.load(temperatures + slot, mask=exists)
    tl.store(temperatures_out + index, temperature, mask=exists)
    tl.store(seeds_out + index, tl.load(seeds + slot, mask=exists), mask=exists)
