"""Drafted tokens, and the Q that they were drawn from: what the verifier reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.tree_tables import DraftLevels, Level
from sequoia_vllm.kernels.children import DrawWorkspace, draw_children


@dataclass(frozen=True)
class DraftedTrees:
    """The trees of a batch. They stay in place, so CUDA graphs may hold them."""

    nodes: Tensor  # int32 ``[slots]``: nodes drafted, root included; 0: none
    rows: Tensor  # int32 ``[slots]``: the request's first row of the two tensors below
    logits: Tensor
    """``[rows, I, V]``: draft logits of the nodes with children. Node i of row r lies where row r +
    i has its first node: trees of a batch follow one another, each with `DraftLevels.rows_per_tree`
    rows."""
    stats: Tensor  # float32 ``[rows, I, 2]``: maximum and sum that make them Q, likewise
    tokens: Tensor
    """int64 ``[max_num_reqs, N]``: drafted tokens of the batch's requests, in stored order; column
    0 is the root's, and is not written here."""
    _workspace: DrawWorkspace = field(default_factory=DrawWorkspace)

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
        self, batch: DraftBatch, num_reqs: int, levels: DraftLevels, level: Level, logits: Tensor
    ) -> None:
        """Draws the children of one level's nodes, and keeps the Q that they are drawn from.

        Args:
            num_reqs: R: its first R requests have trees.
            logits: ``[R * m, V]``: the draft's at these nodes, request after request.
        """
        draw_children(
            logits=logits,
            temperature=batch.temperature[:num_reqs],
            top_k=batch.top_k[:num_reqs],
            top_p=batch.top_p[:num_reqs],
            min_p=batch.min_p[:num_reqs],
            seeds=batch.seeds[:num_reqs],
            modes=batch.modes[:num_reqs],
            positions=batch.roots[:num_reqs],
            depth=level.depth,
            slots=batch.slots[:num_reqs],
            nodes=level.nodes,
            counts=level.counts,
            columns=level.columns,
            tokens=self.tokens[:num_reqs],
            told=batch.told[:num_reqs],
            draft_logits=self.logits,
            draft_stats=self.stats,
            state_rows=batch.multiples(levels.rows_per_tree)[:num_reqs],
            inner_rows=level.rows,
            workspace=self._workspace,
        )
