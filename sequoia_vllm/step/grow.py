"""Grow: the draft's trees of a batch, level by level.

Each node's children are drawn as the request's sampling asks; dynamic trees choose their nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_vllm.drafting.dynamic_trees import DynamicGrowth, SharedNodes, TreeLayouts
from sequoia_vllm.drafting.tree_tables import DraftLevels, Level
from sequoia_vllm.step.seeds import gumbel_noise, peek_seeds
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.retrieval import following, preferred
from sequoia_vllm.verification.sampling import (
    Truncation,
    draft_distribution,
    draft_scores,
    draw_without_replacement,
    is_greedy,
)

logger = logging.getLogger("vllm.sequoia")


@cache
def _say_that_it_is_broken() -> None:
    logger.warning(
        "Sequoia: the draft model gave NaN or infinite logits. Outputs stay the target's, but "
        "hardly any draft is accepted: check the draft's weights and dtype (said once)"
    )


@dataclass(frozen=True)
class GrownTrees:
    """Trees of B requests from one drafting pass."""

    tokens: Tensor  # int64 ``[B, N]``: the tree's N nodes in stored order; column 0 is the root
    probs: Tensor
    """float32 ``[P, V]``: draft distributions Q, exactly as sampled. Greedy and seeded requests
    store none: their verification does not need Q."""
    probs_rows: Tensor  # int64 ``[B, N]``: each node's row in ``probs``; -1: none
    shared: SharedNodes | None = None
    """Dynamic trees, in memory for N nodes of each; None: all have the engine's topology."""
    is_told: bool = False  # whether all are branches of told tokens, see `grow_told`

    @cached_property
    def layouts(self) -> TreeLayouts | None:
        """The shapes of dynamic trees."""
        return None if self.shared is None else TreeLayouts.of(self.shared.parents)


@dataclass(frozen=True)
class Draft:
    """The tree of one request: a row of a `GrownTrees`."""

    grown: GrownTrees
    row: int


class DraftSampling:
    """Draws children without replacement, and keeps Q where the verifier will need it.

    `grow` calls `start`, then `children` for each level from the root down, and
    `finish` at the end. Greedy requests take the draft's top-k. Sampled requests draw by
    Gumbel-top-k at their temperature, and their Q is stored. Seeded requests take the top-k under
    the noise that will decide the target's token (see `seeds`).

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
    def greedy(cls, batch: int) -> DraftSampling:
        """Sampling of a batch in which every request is greedy."""
        seeds, is_seeded = torch.zeros(batch, 0), torch.zeros(batch, dtype=torch.bool)
        return cls(torch.zeros(batch), seeds, is_seeded, Truncation())

    @classmethod
    def of(
        cls,
        requests: NDArray[np.int64],
        every_temperature: Tensor | None,
        generators: Mapping[int, torch.Generator],
        truncation: Truncation,
        depth: int,
    ) -> DraftSampling:
        """Sampling that these requests of a batch ask for.

        Args:
            requests: int64 ``[R]``: their places in the batch.
            every_temperature: float32, of all requests of the batch; None: all are greedy.
            generators: Of seeded requests, by place.
            truncation: Of all requests.
            depth: Of the trees.
        """
        if every_temperature is None:
            return cls.greedy(len(requests))
        temperature = every_temperature[requests]
        temperature = torch.where(is_greedy(temperature), 0.0, temperature)
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

    def children(self, logits: Tensor, level: Level, given: Tensor | None) -> Tensor:
        """Draws children of one level's nodes for every request.

        Args:
            logits: ``[B * m, V]``: draft logits at the nodes, request after request.
            level: The level, whose nodes have at most b children each.
            given: int64 ``[B, m]``: tokens that Q prefers, see `preferred`; -1: none. None: no node
                has one.

        Returns:
            int64 ``[B, m, b]``, in draft order.
        """

        def given_to(requests: Tensor) -> Tensor | None:
            return None if given is None else given[requests].flatten()

        width, branch = level.columns.shape
        batch = len(self.temperature)
        logits, shape = logits.to(torch.float32), (batch, width, branch)
        if len(self.sampled) == batch:
            drawn = torch.empty(shape, dtype=torch.int64)
        else:  # greedy rows stay so
            drawn = _told(logits, given).topk(branch, dim=-1).indices.view(shape)
        per_request = logits.view(batch, width, -1)
        if len(self.sampled):
            rows = self.sampled.repeat_interleave(width)
            draft = draft_distribution(
                per_request[self.sampled].flatten(0, 1),
                self.temperature[rows],
                self.truncation.of(rows),
                given_to(self.sampled),
            )
            broken = draft[:, 0].isnan()  # softmax spreads one NaN over its row
            if broken.any():
                draft[broken] = 1.0 / draft.shape[1]
                _say_that_it_is_broken()
            self._store(draft, level.nodes)
            tokens = draw_without_replacement(draft, branch)
            drawn[self.sampled] = tokens.view(-1, width, branch)
        if len(self.seeded):
            noisy = self._noisy(per_request[self.seeded], level.depth, given_to(self.seeded))
            drawn[self.seeded] = noisy.topk(branch, dim=-1).indices
        return drawn

    def finish(self, tokens: Tensor) -> GrownTrees:
        """Joins tokens int64 ``[B, size]``, in stored order, with the stored Q."""
        return GrownTrees(tokens, self._probs, self._probs_rows)

    def _noisy(self, logits: Tensor, depth: int, given: Tensor | None) -> Tensor:
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


LogitsAt = Callable[[Tensor, int, Tensor, int], Tensor]
"""``(tokens, depth, sees, first) -> logits``: the draft's, ``[B * m, V]``, at m nodes of each tree.

``tokens`` are int64 ``[B, m]``, all nodes at one ``depth``. ``sees``, bool ``[m, M]`` or
``[B, m, M]``, says which of the nodes that the draft reads each of them sees. ``first`` is their
first one's place among these. Logits come request after request."""


def grow(
    levels: DraftLevels, roots: Tensor, logits: Tensor, told: Tensor, sampling: DraftSampling,
    logits_at: LogitsAt,
) -> GrownTrees:  # fmt: skip
    """Grows one tree for each of B requests, with the engine's topology.

    Args:
        roots: int64 ``[B]``: tokens of the roots.
        logits: ``[B, V]``: the draft's, after them.
        told: int64 ``[B, D]``: what the requests' texts say comes next, see `continuations`.
    """
    tokens = torch.empty(len(roots), levels.tree.size, dtype=torch.int64)
    sampling.start(levels.tree, logits.shape[-1])
    parents, says = roots[:, None], _says(told)
    for level in levels.levels:
        if level.depth > 0:
            parents = tokens.index_select(1, level.nodes)
            sees = levels.ancestors[level.first : level.first + level.width]
            logits = logits_at(parents, level.depth, sees, level.first)
        given = following(parents, told, level.depth) if says else None
        drawn = sampling.children(logits, level, given)
        tokens.index_copy_(1, level.columns.flatten().long(), drawn.flatten(1))
    tokens[:, 0] = roots  # last: column 0 collects what nodes drew beyond their own children
    return sampling.finish(tokens)


def grow_dynamic(
    growth: DynamicGrowth, logits: Tensor, told: Tensor, logits_at: LogitsAt,
    most: Tensor, deepest: Tensor,
) -> SharedNodes:  # fmt: skip
    """Grows trees of their own shapes for greedy requests, which share their nodes.

    ``most`` and ``deepest`` are as in `DynamicGrowth.best`, other arguments as of `grow`.
    """
    says = _says(told)
    for depth in range(growth.depth):
        if depth > 0:
            growth.descend()
            first = growth.seen.shape[2] - growth.width
            logits = logits_at(growth.tokens, depth, growth.seen, first)
        given = following(growth.tokens, told, depth) if says else None
        growth.add_children(_told(logits.float(), given).view(*growth.tokens.shape, -1))
    return growth.best(told, most, deepest)


def _says(told: Tensor) -> bool:
    """Whether any of the texts says something: most do not, and asking each node costs more."""
    return bool((told[:, 0] >= 0).any())


def _told(logits: Tensor, given: Tensor | None) -> Tensor:
    """Scores ``[R, V]`` of a softmax, where so many nodes' tokens were told; see `preferred`."""
    return logits if given is None else preferred(logits, given.flatten())


def grow_told(roots: Tensor, told: Tensor, lengths: Tensor) -> GrownTrees:
    """Makes branches of told tokens, each the only child of the one before: no draft is asked.

    Q is one at the told token. Like a match, a branch's length is known before the step draws
    anything. So Q is a function of a node's path alone, and verification stays exact.

    Args:
        roots: int64 ``[B]``: tokens of the roots.
        told: int64 ``[B, W]``: what comes next.
        lengths: int64 ``[B]``: how many of these each branch has, at least one.
    """
    nodes = torch.arange(1 + int(lengths.max()))
    places = nodes * (nodes <= lengths[:, None])
    tokens = torch.cat([roots[:, None], told], dim=1)[:, : len(nodes)]
    shared = SharedNodes(tokens, (nodes - 1).expand_as(tokens), places)
    return GrownTrees(tokens, torch.empty(0), torch.full_like(tokens, -1), shared, is_told=True)
