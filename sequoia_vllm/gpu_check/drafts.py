"""Drafts of a batch, drawn from given logits: what verification starts from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sequoia_vllm.drafting.levels import Level
from sequoia_vllm.gpu_check.trees import TreeTables
from sequoia_vllm.kernels.children import DrawWorkspace, draw_children
from sequoia_vllm.kernels.commit import CacheLayers, commit_accepted
from sequoia_vllm.kernels.verify import verify_trees


@dataclass
class DraftedBatch:
    """The buffers of R requests with one tree: drafts, their Q, and what becomes of them.

    Attributes:
        tables: The tree.
        modes: int32 ``[R]``, see `sequoia_vllm.kernels.modes`.
        temperature: float32 ``[R]``.
        seeds: int64 ``[R]``.
        roots: int32 ``[R]``: position of each root.
        tokens: int64 ``[R, N]``: column 0 is the root's.
        draft_logits: ``[R, I, V]``.
        draft_stats: float32 ``[R, I, 2]``.
        sampled: int64 ``[R, D + 1]``: emitted tokens, then -1.
        num_sampled: int32 ``[R]``.
        accepted: int32 ``[R, D]``: accepted path, then -1.
        places: int32 ``[R]``: 0, 1, 2, ...: where each request's Q is.
        row_starts: int32 ``[R + 1]``: 0, N, 2 * N, ...
    """

    tables: TreeTables
    modes: Tensor
    temperature: Tensor
    seeds: Tensor
    roots: Tensor
    tokens: Tensor
    draft_logits: Tensor
    draft_stats: Tensor
    sampled: Tensor
    num_sampled: Tensor
    accepted: Tensor
    places: Tensor
    row_starts: Tensor
    _workspace: DrawWorkspace = field(default_factory=DrawWorkspace)

    @classmethod
    def make(
        cls, tables: TreeTables, requests: int, vocabulary: int, dtype: torch.dtype, mode: int
    ) -> DraftedBatch:
        """Requests with seeds 1, 2, ..., temperature 1, and roots at position 0."""
        device = tables.children.device

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((requests, *shape), value, dtype=dtype, device=device)

        size, depth = tables.tree.size, tables.tree.depth
        return cls(
            tables=tables,
            modes=full(mode, torch.int32),
            temperature=full(1.0, torch.float32),
            seeds=torch.arange(1, requests + 1, device=device),
            roots=full(0, torch.int32),
            tokens=full(0, torch.int64, size),
            draft_logits=full(0, dtype, tables.num_inner, vocabulary),
            draft_stats=full(1, torch.float32, tables.num_inner, 2),
            sampled=full(-1, torch.int64, depth + 1),
            num_sampled=full(0, torch.int32),
            accepted=full(-1, torch.int32, depth),
            places=torch.arange(requests, dtype=torch.int32, device=device),
            row_starts=torch.arange(requests + 1, dtype=torch.int32, device=device) * size,
        )

    @property
    def num_reqs(self) -> int:
        """R."""
        return len(self.modes)

    def draw(self, level: Level, logits: Tensor) -> None:
        """Draws the children of one level's nodes; ``logits`` are ``[R * m, V]``."""
        draw_children(
            logits=logits,
            temperature=self.temperature,
            seeds=self.seeds,
            modes=self.modes,
            positions=self.roots,
            depth=level.depth,
            nodes=level.nodes,
            counts=level.counts,
            columns=level.columns,
            tokens=self.tokens,
            draft_logits=self.draft_logits,
            draft_stats=self.draft_stats,
            state_rows=self.places,
            inner_rows=level.rows,
            workspace=self._workspace,
        )

    def verify(self, logits: Tensor, target_tokens: Tensor) -> None:
        """Verifies all trees; ``[R * N, V]`` before temperature, and int64 ``[R * N]``."""
        verify_trees(
            logits=logits,
            target_temperatures=self.temperature,
            tokens=self.tokens.view(-1),
            target_tokens=target_tokens,
            cu_num_logits=self.row_starts,
            modes=self.modes,
            positions=self.roots,
            seeds=self.seeds,
            children=self.tables.children,
            inner_index=self.tables.inner_index,
            draft_logits=self.draft_logits,
            draft_stats=self.draft_stats,
            state_rows=self.places,
            draft_temperatures=self.temperature,
            sampled_tokens=self.sampled,
            num_sampled=self.num_sampled,
            accepted=self.accepted,
        )

    def commit(self, layers: CacheLayers, block_table: Tensor) -> None:
        """Moves the accepted paths' keys and values behind their roots."""
        commit_accepted(
            layers, block_table=block_table, context_lens=self.roots, accepted=self.accepted
        )
