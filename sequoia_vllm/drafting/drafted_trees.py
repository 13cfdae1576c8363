"""Drafted tokens, and the Q that they were drawn from: what the verifier reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.tree_tables import DraftLevels, Level
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


@dataclass(frozen=True)
class DraftedTrees:
    """The trees of a batch. They stay in place, so CUDA graphs may hold them."""

    nodes: Tensor  # int32 ``[slots]``: nodes drafted, root included; 0: none
    rows: Tensor  # int32 ``[slots]``: the request's first row of the two tensors below
    logits: Tensor
    """``[rows, I, V]``: draft logits of the nodes with children, of sampled requests, lowered
    outside the nucleus. Node i of row r lies where row r + i has its first node: trees of a batch
    follow one another, each with `DraftLevels.rows_per_tree` rows."""
    stats: Tensor
    """float32 ``[rows, I, 2]``: maximum and sum that make them Q (`draft_probability`)."""
    tokens: Tensor
    """int64 ``[max_num_reqs, N]``: drafted tokens of the batch's requests, in stored order; column
    0 is the root's, and is not written here."""
    _workspaces: list[Tensor] = field(default_factory=list)
    """Memory between launches, the last piece for all levels. Pieces that became too small stay: a
    CUDA graph may hold their addresses. Draw the largest level first, so that there is one."""

    @classmethod
    def empty(
        cls, slots: int, rows: int, inner: int, size: int, vocab_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> DraftedTrees:  # fmt: skip
        """Starts without drafts.

        Args:
            slots: Request slots of the engine; no batch has more requests.
            rows: Nodes with children, of all trees of a batch.
            inner: Nodes with children of the largest tree.
            vocab_size: The draft's.
        """
        logits = torch.zeros(rows + inner - 1, vocab_size, dtype=dtype, device=device)
        stats = torch.ones(rows + inner - 1, 2, dtype=torch.float32, device=device)
        return cls(
            nodes=torch.zeros(slots, dtype=torch.int32, device=device),
            rows=torch.zeros(slots, dtype=torch.int32, device=device),
            logits=logits.as_strided((rows, inner, vocab_size), (vocab_size, vocab_size, 1)),
            stats=stats.as_strided((rows, inner, 2), (2, 2, 1)),
            tokens=torch.zeros(slots, size, dtype=torch.int64, device=device),
        )

    def draw(
        self, batch: DraftBatch, num_reqs: int, levels: DraftLevels, level: Level, logits: Tensor,
        with_statistics: bool = False,
    ) -> Tensor:  # fmt: skip
        """Draws the children of one level's m nodes, and keeps the Q that they are drawn from.

        By mode (`sequoia_vllm.kernels.modes`): GREEDY, the largest logits in order; SAMPLED, draws
        from Q without replacement; SEEDED, the largest logits over temperature under the noise with
        which vLLM draws the target's token after the node; SKIP, token 0. Equal scores: the lower
        token first. A token that the request's text says comes next is first in modes GREEDY and
        SEEDED. It has a probability of `TOLD_SHARE` at least in Q. A request's tokens do not
        depend on other requests. Nothing waits for the device.

        Args:
            num_reqs: R: its first R requests have trees.
            logits: ``[R * m, V]``, float32, bfloat16 or float16, contiguous in its rows: the
                draft's at these nodes, request after request.
            with_statistics: Whether greedy rows need what is returned; else sampled rows have it.

        Returns:
            float32 ``[R * m, blocks, 2]``, until the next draw: of each block of the vocabulary the
            largest logit (by temperature, where sampled), and the sum of exp(logit - largest).

        Raises:
            ValueError: If shapes or dtypes do not fit together, or a node has more than V children.
        """
        (rows, vocabulary), max_children = logits.shape, level.columns.shape[-1]
        self._check(num_reqs, level, logits)
        branch = triton.next_power_of_2(max_children)
        block, num_blocks = _blocks(vocabulary, branch)
        blocks = triton.next_power_of_2(num_blocks)
        bins = -(-truncation.workspace_size(rows, vocabulary) // 2)  # in the place of what follows
        size = max(rows * num_blocks * (1 + branch), bins)
        scratch = self._workspace(size + rows)
        partials = scratch[: rows * num_blocks].view(torch.float32)
        candidates = scratch[rows * num_blocks : size]
        lowest = scratch[size:].view(torch.float32)
        modes, slots, slot_rows = batch.modes, batch.slots, rows_per_slot(level.nodes, 1)
        state_rows = batch.multiples(levels.rows_per_tree)
        kept = self.logits, self.logits.stride(0), self.logits.stride(1)
        truncation.lowest_inside(logits, batch, level.width, lowest, scratch.view(torch.int32))
        row_statistics_kernel[(rows, num_blocks)](
            logits, logits.stride(0), lowest, batch.temperature, modes, slots, slot_rows,
            level.width, vocabulary, partials, *kept, len(self.logits), state_rows, level.rows,
            int(with_statistics), BLOCK=block, num_warps=4,
        )  # fmt: skip
        block_best_kernel[(rows, num_blocks)](
            logits, logits.stride(0), lowest, batch.temperature, batch.seeds, modes, batch.roots,
            level.depth, slots, slot_rows, level.nodes, level.counts, level.width, vocabulary,
            partials, candidates, batch.told, batch.told.shape[1], self.tokens,
            self.tokens.stride(0), *kept, self.stats, self.stats.stride(0), self.stats.stride(1),
            len(self.logits), state_rows, level.rows, BLOCK=block, BLOCKS=blocks, BRANCH=branch,
            num_warps=_BEST_WARPS,
        )  # fmt: skip
        merge_best_kernel[(rows,)](
            modes, slots, slot_rows, level.counts, level.columns, max_children, level.width,
            num_blocks, candidates, self.tokens, self.tokens.stride(0), BLOCKS=blocks,
            BRANCH=branch, num_warps=_merge_warps(blocks * branch),
        )  # fmt: skip
        return partials.view(rows, num_blocks, 2)

    def _check(self, num_reqs: int, level: Level, logits: Tensor) -> None:
        (rows, vocabulary), max_children = logits.shape, level.columns.shape[-1]
        if rows != num_reqs * level.width:
            raise ValueError(
                f"{num_reqs} requests of {level.width} nodes, but {rows} rows of logits"
            )
        if max_children > vocabulary:
            raise ValueError(f"{max_children} children of a vocabulary of {vocabulary}")
        if self.logits.dtype != logits.dtype or self.logits.shape[2] < vocabulary:
            raise ValueError(
                f"{self.logits.dtype} {list(self.logits.shape)} cannot keep"
                f" {logits.dtype} logits of {vocabulary} tokens"
            )
        if logits.stride(-1) != 1 or not level.columns.is_contiguous():
            raise ValueError("logits and columns must be contiguous in their rows")

    def _workspace(self, size: int) -> Tensor:
        """int64 ``[size]``; the same memory every time."""
        held = len(self._workspaces[-1]) if self._workspaces else 0
        if held < size:
            # Doubled: so all earlier pieces together are smaller than the present one.
            more = torch.empty(max(size, 2 * held), dtype=torch.int64, device=self.logits.device)
            self._workspaces.append(more)
        return self._workspaces[-1][:size]


def _blocks(vocabulary: int, branch: int) -> tuple[int, int]:
    """Tokens per block, and blocks: small ones, unless they left too many candidates."""
    block = _MIN_BLOCK
    while -(-vocabulary // block) * branch > _MAX_CANDIDATES:
        block *= 2
    return block, -(-vocabulary // block)


def _merge_warps(candidates: int) -> int:
    return max(4, min(16, candidates // 512))
