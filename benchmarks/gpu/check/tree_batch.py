"""Requests with trees, without an engine: drafts, verification and commit."""

from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.tree_tables import Level, TreeTables
from sequoia_vllm.kernels.commit import CacheLayers, commit_accepted
from sequoia_vllm.kernels.scoring_inputs import VerifierInputs
from sequoia_vllm.kernels.verify import TreesToVerify
from sequoia_vllm.tree import TokenTree, optimize_tree
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE
from sequoia_vllm.verification.methods import method_of


def best_tree(size: int, depth: int) -> TokenTree:
    """The best tree of this size for the authors' published acceptance vector."""
    return optimize_tree(REFERENCE_ACCEPTANCE, size, depth)


class TreeBatch:
    """R requests with one tree of N nodes, of which I have children, and depth D.

    They begin with seeds 1, 2, ..., temperature 1, and roots at position 0.

    Attributes:
        sampled: int64 ``[R, D + 1]``: emitted tokens, then -1.
        num_sampled: int32 ``[R]``.
        accepted: int32 ``[R, D]``: accepted path, then -1.

    Args:
        vocabulary: Of draft and target.
        dtype: Of the draft's logits.
        mode: Of all requests, see `sequoia_vllm.kernels.modes`.
    """

    def __init__(
        self, tables: TreeTables, requests: int, vocabulary: int, dtype: torch.dtype, mode: int
    ) -> None:
        device, tree = tables.children.device, tables.tree
        inner = tables.levels.rows_per_tree
        self.tables = tables
        self._method_tables: dict[str, Any] = {}
        self.drafted = DraftedTrees.empty(
            requests, requests * inner, inner, tree.size, vocabulary, dtype, device
        )
        self.requests = DraftBatch(requests, device)
        self.requests.slots.copy_(torch.arange(requests))
        self.requests.counts.fill_(tree.depth + 1)
        self.requests.modes.fill_(mode)
        self.requests.temperature.fill_(1.0)
        self.requests.seeds.copy_(torch.arange(1, requests + 1))
        self.sampled = torch.full((requests, tree.depth + 1), -1, device=device)
        self.num_sampled = torch.zeros(requests, dtype=torch.int32, device=device)
        # Of requests that take the target's own tokens: nothing reads them here.
        self._target_tokens = torch.zeros(requests * tree.size, dtype=torch.int64, device=device)
        self.accepted = torch.full_like(self.sampled[:, 1:], -1, dtype=torch.int32)

    @property
    def num_reqs(self) -> int:
        """R."""
        return len(self.num_sampled)

    @property
    def draft_logits(self) -> Tensor:
        """``[R, I, V]``: what the drafts were drawn from, a view."""
        return self.drafted.logits[:: self.tables.levels.rows_per_tree]

    @property
    def draft_stats(self) -> Tensor:
        """float32 ``[R, I, 2]``: maximum and sum that make them Q, a view."""
        return self.drafted.stats[:: self.tables.levels.rows_per_tree]

    def draw(self, level: Level, logits: Tensor) -> None:
        """Draws the children of one level's nodes; ``logits`` are ``[R * m, V]``."""
        self.drafted.draw(self.requests, self.num_reqs, self.tables.levels, level, logits)

    def draw_all(self, logits: Tensor) -> None:
        """Draws all levels from the logits ``[R, I, V]`` of nodes with children."""
        for level in self.tables.levels.levels:
            rows = logits[:, level.rows.long()].reshape(-1, logits.shape[2])
            self.draw(level, rows.contiguous())

    def draw_accepted(self) -> Tensor:
        """Draws all levels, always the same.

        Returns:
            float32 ``[R * N, V]``, target logits under which first children are accepted: the
            draft's own at inner nodes, and of leaves the root's.
        """
        shape, device = self.draft_logits.shape, self.draft_logits.device
        generator = torch.Generator(device).manual_seed(41)
        drawn = torch.empty(shape, device=device).normal_(0, 2, generator=generator)
        inner = drawn.to(self.draft_logits.dtype)
        self.draw_all(inner)
        rows = self.tables.inner_rows.long().clamp(min=0)
        return inner[:, rows].float().reshape(-1, shape[2])

    def verify(self, logits: Tensor, method: str) -> None:
        """Verifies all trees, by the target's logits before temperature, ``[R * N, V]``."""
        requests, drafted = self.requests, self.drafted
        trees = TreesToVerify(
            logits=logits,
            target_temperatures=requests.temperature,
            inputs=VerifierInputs(
                tokens=drafted.tokens.view(-1),
                token_ids=self._target_tokens,  # not read, like the next
                positions=self._target_tokens,
                modes=requests.modes,
                root_positions=requests.roots,
                state_rows=requests.multiples(self.tables.levels.rows_per_tree)[: self.num_reqs],
                temperatures=requests.temperature,
                seeds=requests.seeds,
                slots=requests.slots,
            ),
            target_tokens=self._target_tokens,
            cu_num_logits=requests.multiples(self.tables.tree.size),
            children=self.tables.children,
            inner_index=self.tables.inner_rows,
            draft_logits=drafted.logits,
            draft_stats=drafted.stats,
            sampled_tokens=self.sampled,
            num_sampled=self.num_sampled,
            accepted=self.accepted,
        )
        found = method_of(method)
        if method not in self._method_tables:
            parents = self.tables.tree.parents
            self._method_tables[method] = found.tree_tables(parents, logits.device)
        found.kernel_launcher()(trees, self._method_tables[method])

    def commit(self, layers: CacheLayers, block_table: Tensor) -> None:
        """Moves the accepted paths' keys and values behind their roots."""
        commit_accepted(
            layers,
            block_table=block_table,
            context_lens=self.requests.roots,
            accepted=self.accepted,
        )
