"""Drafting in Triton: the children of all nodes of a level, drawn in five launches.

The law and the method of drawing are in `sequoia_vllm.kernels.children_kernels`.
"""

import torch
import triton
from torch import Tensor

from sequoia_vllm.kernels import truncation
from sequoia_vllm.kernels.children_kernels import (
    block_best_kernel,
    merge_best_kernel,
    row_statistics_kernel,
)
from sequoia_vllm.kernels.tree_shapes import rows_per_slot

_MIN_BLOCK = 1024
# Four tokens per thread: with eight Triton 3.8 spills on some devices.
_BEST_WARPS = 8
# What one program of the last launch holds in registers without spilling.
_MAX_CANDIDATES = 8192


class DrawWorkspace:
    """Memory between the launches; one for all levels drawn on a stream.

    It grows when more is needed. Memory that was handed out stays allocated, since a CUDA graph may
    hold its address. Draw the largest level first, so that memory is taken only once.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, size: int, device: torch.device) -> Tensor:
        """int64 ``[size]`` on ``device``; the same memory every time."""
        held = self._buffers[-1] if self._buffers else None
        if held is None or len(held) < size or held.device != device:
            # Doubled: so all earlier pieces together are smaller than the present one.
            grown = max(size, 2 * len(held) if held is not None else 0)
            held = torch.empty(grown, dtype=torch.int64, device=device)
            self._buffers.append(held)
        return held[:size]

    @property
    def size_in_bytes(self) -> int:
        """All that is allocated."""
        return sum(buffer.nbytes for buffer in self._buffers)


def draw_children(
    *,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    modes: Tensor,
    positions: Tensor,
    depth: int,
    slots: Tensor,
    nodes: Tensor,
    counts: Tensor,
    columns: Tensor,
    tokens: Tensor,
    draft_logits: Tensor,
    draft_stats: Tensor,
    state_rows: Tensor,
    inner_rows: Tensor,
    told: Tensor,
    workspace: DrawWorkspace,
) -> None:
    """Draws the children of the m nodes of one level, for R requests.

    By mode (`sequoia_vllm.kernels.modes`): GREEDY, the largest logits in order; SAMPLED, draws from
    Q without replacement; SEEDED, the largest logits over temperature under the noise with which
    vLLM draws the target's token after the node; SKIP, token 0. Equal scores: the lower token
    first. A token that the request's text says comes next is first in modes GREEDY and SEEDED, and
    has a probability of `TOLD_SHARE` at least in Q. A request's tokens do not depend on other
    requests. Nothing waits for the device.

    Args:
        logits: ``[R * m, V]``, float32, bfloat16 or float16, contiguous in its
            rows; the m rows of a request follow one another.
        temperature: float32 ``[R]``; above 0 where SAMPLED or SEEDED.
        top_k, top_p, min_p: int32, float32 and float32 ``[R]``; V or more, 1 and 0 where
            not used. What they exclude of SAMPLED and SEEDED rows is lowered.
        seeds: int64 ``[R]``.
        modes: int32 ``[R]``.
        positions: int32 ``[R]``: position of each root.
        depth: Depth of the m nodes.
        slots: int64 ``[R]``: request slot of each, -1 for padding.
        nodes: int32 ``[m]``, or ``[S, m]`` by slot, as what follows: stored index, part of the
            key of the random numbers.
        counts: int32 ``[m]``: children of each, at most b.
        columns: int32 ``[m, b]``: column of each child in ``tokens``, in draft order.
        tokens: int64 or int32 ``[R, >= N]``: written, at these columns only.
        draft_logits: ``[S, I, >= V]``, dtype of ``logits``: gets the logits of
            SAMPLED rows, lowered outside the nucleus.
        draft_stats: float32 ``[S, I, 2]``: gets their maximum and sum, see
            `draft_probability`.
        state_rows: int32 or int64 ``[R]``: row of each request in these two; where
            it is none of theirs nothing is kept.
        inner_rows: int32 ``[m]``, or by slot: likewise of each node.
        told: int64 ``[R, D]``, contiguous: what each request's text says comes next; outside the
            vocabulary: nothing. Below the root it is about nodes whose own token it told, too.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or b exceeds V.
    """
    width, max_children = columns.shape[-2:]
    rows, vocabulary = logits.shape
    _check(logits, modes, columns, tokens, draft_logits, draft_stats)
    branch = triton.next_power_of_2(max_children)
    block, num_blocks = _blocks(vocabulary, branch)
    padded_blocks = triton.next_power_of_2(num_blocks)
    bins = -(-truncation.workspace_size(rows, vocabulary) // 2)  # in the place of what follows
    size = max(rows * num_blocks * (1 + branch), bins)
    scratch = workspace.take(size + rows, logits.device)
    partials = scratch[: rows * num_blocks].view(torch.float32)
    candidates = scratch[rows * num_blocks : size]
    lowest = scratch[size:].view(torch.float32)
    num_state_rows, slot_rows = draft_logits.shape[0], rows_per_slot(nodes, 1)
    grid = (rows, num_blocks)
    truncation.lowest_inside(
        logits, temperature, top_k, top_p, min_p, modes, lowest, scratch.view(torch.int32)
    )
    row_statistics_kernel[grid](
        logits, logits.stride(0), lowest, temperature, modes, slots, slot_rows, width, vocabulary,
        partials, draft_logits, draft_logits.stride(0), draft_logits.stride(1), num_state_rows,
        state_rows, inner_rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    block_best_kernel[grid](
        logits, logits.stride(0), lowest, temperature, seeds, modes, positions, depth,
        slots, slot_rows, nodes, counts, width, vocabulary, partials, candidates,
        told, told.shape[1], tokens, tokens.stride(0),
        draft_logits, draft_logits.stride(0), draft_logits.stride(1),
        draft_stats, draft_stats.stride(0), draft_stats.stride(1), num_state_rows,
        state_rows, inner_rows, BLOCK=block, BLOCKS=padded_blocks, BRANCH=branch,
        num_warps=_BEST_WARPS,
    )  # fmt: skip
    merge_best_kernel[(rows,)](
        modes, slots, slot_rows, counts, columns, max_children, width, num_blocks, candidates,
        tokens, tokens.stride(0), BLOCKS=padded_blocks, BRANCH=branch,
        num_warps=_merge_warps(padded_blocks * branch),
    )  # fmt: skip


def _check(
    logits: Tensor,
    modes: Tensor,
    columns: Tensor,
    tokens: Tensor,
    draft_logits: Tensor,
    draft_stats: Tensor,
) -> None:
    width, max_children = columns.shape[-2:]
    rows, vocabulary = logits.shape
    if rows != len(modes) * width:
        raise ValueError(f"{len(modes)} requests of {width} nodes, but {rows} rows of logits")
    if max_children > vocabulary:
        raise ValueError(f"{max_children} children of a vocabulary of {vocabulary}")
    if draft_logits.dtype != logits.dtype or draft_logits.shape[2] < vocabulary:
        raise ValueError(
            f"{draft_logits.dtype} {list(draft_logits.shape)} cannot keep"
            f" {logits.dtype} logits of {vocabulary} tokens"
        )
    if draft_stats.shape[:2] != draft_logits.shape[:2]:
        raise ValueError("draft_stats and draft_logits differ in rows")
    last_strides = {tensor.stride(-1) for tensor in (logits, draft_logits, draft_stats, tokens)}
    if last_strides != {1} or not columns.is_contiguous():
        raise ValueError("logits, statistics, tokens and columns must be contiguous in their rows")


def _blocks(vocabulary: int, branch: int) -> tuple[int, int]:
    """Tokens per block, and blocks: small ones, unless they left too many candidates."""
    block = _MIN_BLOCK
    while -(-vocabulary // block) * branch > _MAX_CANDIDATES:
        block *= 2
    return block, -(-vocabulary // block)


def _merge_warps(candidates: int) -> int:
    return max(4, min(16, candidates // 512))
