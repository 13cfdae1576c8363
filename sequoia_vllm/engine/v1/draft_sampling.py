"""Draws each node's children from the draft's distribution, as the request's sampling asks."""

import logging
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata

from sequoia_vllm.drafting.tree_tables import Level
from sequoia_vllm.engine.v1.batch_trees import DraftedTreesV1
from sequoia_vllm.engine.v1.seeded import gumbel_noise, peek_seeds
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.retrieval import preferred
from sequoia_vllm.verification.sampling import (
    GREEDY_BELOW,
    Truncation,
    draft_distribution,
    draft_scores,
    draw_without_replacement,
)

logger = logging.getLogger("vllm.sequoia")


@cache
def _say_that_it_is_broken() -> None:
    logger.warning(
        "Sequoia: the draft model gave NaN or infinite logits. Outputs stay the target's, but "
        "hardly any draft is accepted: check the draft's weights and dtype (said once)"
    )


class DraftSampling:
    """Draws children without replacement, and keeps Q where the verifier will need it.

    `TreeProposerV1.grow` calls `start`, then `children` for each level from the root down, and
    `finish` at the end. Greedy requests take the draft's top-k. Sampled requests draw by
    Gumbel-top-k at their temperature, and their Q is stored. Seeded requests take the top-k under
    the noise that will decide the target's token (see `seeded`).

    Args:
        temperature: float32 ``[B]``; 0 is greedy.
        seeds: int64 ``[B, depth]``: the noise seeds of seeded requests.
        is_seeded: bool ``[B]``: which requests have a seed.
        truncation: Sampled and seeded requests lower the logits of what it excludes.
    """

    def __init__(
        self, temperature: Tensor, seeds: Tensor, is_seeded: Tensor, truncation: Truncation
    ) -> None:
        greedy = temperature == 0
        self.temperature = temperature
        self.seeds = seeds
        self.truncation = truncation
        self._probs, self._probs_rows = torch.empty(0), torch.empty(0)  # none is sampled
        self.seeded = (is_seeded & ~greedy).nonzero().squeeze(1)
        self.sampled = (~is_seeded & ~greedy).nonzero().squeeze(1)

    @classmethod
    def greedy(cls, batch: int) -> "DraftSampling":
        """Sampling of a batch in which every request is greedy."""
        seeds, is_seeded = torch.zeros(batch, 0), torch.zeros(batch, dtype=torch.bool)
        return cls(torch.zeros(batch), seeds, is_seeded, Truncation())

    @classmethod
    def of(
        cls,
        requests: NDArray[np.int64],
        metadata: SamplingMetadata,
        generators: Mapping[int, torch.Generator],
        truncation: Truncation,
        depth: int,
    ) -> "DraftSampling":
        """Sampling that these requests of a batch ask for."""
        if metadata.temperature is None:
            return cls.greedy(len(requests))
        temperature = metadata.temperature[requests]
        temperature = torch.where(temperature < GREEDY_BELOW, 0.0, temperature)
        seeds = torch.zeros(len(requests), depth, dtype=torch.int64)
        is_seeded = torch.zeros(len(requests), dtype=torch.bool)
        for row, request in enumerate(requests.tolist()):
            if request in generators:
                seeds[row] = peek_seeds(generators[request], depth)
                is_seeded[row] = True
        return cls(temperature, seeds, is_seeded, truncation.of(torch.from_numpy(requests)))

    def start(self, tree: TokenTree, vocab_size: int) -> None:
        """Begins trees of this topology; allocates Q for each sampled node with children."""
        if not len(self.sampled):
            return
        internal = sum(1 for children in tree.children if children)
        self._probs = torch.empty(len(self.sampled) * internal, vocab_size)
        self._probs_rows = torch.full((len(self.temperature), tree.size), -1, dtype=torch.int64)
        self._stored = 0

    def children(self, logits: Tensor, level: Level, given: Tensor) -> Tensor:
        """Draws children of one level's nodes for every request.

        Args:
            logits: ``[B * m, V]``: draft logits at the nodes, request after request.
            level: The level, whose nodes have at most b children each.
            given: int64 ``[B, m]``: tokens that Q prefers, see `preferred`; -1: none.

        Returns:
            int64 ``[B, m, b]``, in draft order.
        """
        width, branch = level.columns.shape
        batch = len(self.temperature)
        logits, shape = logits.to(torch.float32), (batch, width, branch)
        if len(self.sampled) == batch:
            drawn = torch.empty(shape, dtype=torch.int64)
        else:  # greedy rows stay so
            drawn = preferred(logits, given.flatten()).topk(branch, dim=-1).indices.view(shape)
        per_request = logits.view(batch, width, -1)
        if len(self.sampled):
            rows = self.sampled.repeat_interleave(width)
            draft = draft_distribution(
                per_request[self.sampled].flatten(0, 1),
                self.temperature[rows],
                self.truncation.of(rows),
                given[self.sampled].flatten(),
            )
            broken = draft[:, 0].isnan()  # softmax spreads one NaN over its row
            if broken.any():
                draft[broken] = 1.0 / draft.shape[1]
                _say_that_it_is_broken()
            self._store(draft, level.nodes)
            tokens = draw_without_replacement(draft, branch)
            drawn[self.sampled] = tokens.view(-1, width, branch)
        if len(self.seeded):
            noisy = self._noisy(per_request[self.seeded], level.depth, given[self.seeded].flatten())
            drawn[self.seeded] = noisy.topk(branch, dim=-1).indices
        return drawn

    def finish(self, tokens: Tensor) -> DraftedTreesV1:
        """Joins tokens int64 ``[B, size]``, in stored order, with the stored Q."""
        return DraftedTreesV1(tokens, self._probs, self._probs_rows)

    def _noisy(self, logits: Tensor, depth: int, given: Tensor) -> Tensor:
        """Scores of seeded requests, with their noise, from logits ``[S, m, V]`` at this depth."""
        rows = self.seeded.repeat_interleave(logits.shape[1])
        scaled = draft_scores(
            logits.flatten(0, 1), self.temperature[rows], self.truncation.of(rows), given
        )
        noise = gumbel_noise(self.seeds[self.seeded, depth], logits.shape[-1])
        return scaled.view_as(logits) + noise[:, None]

    def _store(self, probs: Tensor, nodes: Tensor) -> None:
        end = self._stored + len(probs)
        self._probs[self._stored : end] = probs
        rows = torch.arange(self._stored, end)
        self._probs_rows[self.sampled[:, None], nodes.long()] = rows.view(len(self.sampled), -1)
        self._stored = end
