"""Dynamic trees: each request's topology follows the draft's own probabilities, as in EAGLE-2.

A node's *path probability* is the product of Q over the tokens of its path. No node is likelier
than its parent, so the likeliest ones form a tree, and so does every prefix in this order. On CPUs
the requests of a batch share their nodes: a tree has as many as are among the batch's likeliest.
docs/trees.md says which requests have such trees.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_vllm.verification.retrieval import TOLD_SHARE

CHILDREN_ON_CPUS, CHILDREN_ON_GPUS = 12, 8
"""Children of a node to choose among. With 8 or more nothing is lost at 16 and 32 nodes. With 12,
trees of depth 2 are dynamic with up to 157 nodes, and with 8 with up to 73. GPUs have 8: kernels
need a power of 2, and compare all candidates with each other."""

_LEAST = torch.finfo(torch.float32).min  # less likely than all others


def inner_width(nodes: int, depth: int, children: int) -> int:
    """Nodes of each level that get children in trees of this size, root included, and depth.

    Of each, so many ``children`` can be chosen. 0: there is too little to choose from. Without the
    root, the draft reads fewer nodes than the tree has: they fit in its cache slots.
    """
    width = min((nodes - 1) // max(depth - 1, 1), children)
    candidates = min(children, nodes - 1) * (1 + (depth - 1) * width)
    return width if depth > 1 and candidates >= nodes - 1 else 0


def can_choose(nodes: int, depth: int) -> bool:
    """Whether trees of this size and depth are dynamic on CPUs; if not, they stay static."""
    few = depth == 1 and 1 < nodes - 1 <= CHILDREN_ON_CPUS
    return few or inner_width(nodes, depth, CHILDREN_ON_CPUS) > 0


@dataclass(frozen=True)
class TreeLayouts:
    """The topologies of B trees of N nodes, likeliest nodes first."""

    parents: Tensor  # int64 ``[B, N]``; -1 for the root
    depths: Tensor  # int64 ``[B, N]``
    ancestors: Tensor  # bool ``[B, N, N]``: which nodes each sees, itself included

    @classmethod
    def of(cls, parents: Tensor) -> "TreeLayouts":
        """The layouts with these parents."""
        nodes = parents.shape[1]
        ancestors = torch.eye(nodes, dtype=torch.bool).repeat(len(parents), 1, 1)
        ancestors[..., 0] = True
        up = parents.clamp(min=0)
        above = up
        while above.any():
            ancestors.scatter_(2, above[..., None], True)
            above = up.gather(1, above)
        return cls(parents, ancestors.sum(dim=2) - 1, ancestors)


@dataclass(frozen=True)
class SharedNodes:
    """The trees of B requests that share their nodes, likeliest nodes first."""

    tokens: Tensor  # int64 ``[B, N]``, the root's first
    parents: Tensor  # int64 ``[B, N]``; -1 for the root
    places: Tensor
    """int64 ``[B, N]``: the fewest drafts per request with which the batch has this node. The
    root: 0, and what is no node, behind a tree's nodes: 0."""

    @property
    def sizes(self) -> Tensor:
        """Nodes of each tree, root included, int64 ``[B]``."""
        return 1 + (self.places > 0).sum(dim=1)


class DynamicGrowth:
    """Grows B trees of ``nodes`` nodes in the mean, all levels in turn.

    At each level `add_children` takes what the draft predicts at the level's nodes. `descend` then
    chooses those of the next level. In the end `best` gives the trees.

    Args:
        roots: int64 ``[B]``: tokens of the roots.
        nodes: Nodes of each tree in the mean, root included.
        depth: Levels below the root that the draft predicts; `inner_width`, k, is above 0, or
            there is one level.
    """

    def __init__(self, roots: Tensor, nodes: int, depth: int) -> None:
        batch = len(roots)
        self.nodes, self.depth = nodes, depth
        self.width = inner_width(nodes, depth, CHILDREN_ON_CPUS)
        # int64 ``[B, m]``: tokens of the nodes of the present level that get children.
        self.tokens = self._roots = roots[:, None]
        # bool ``[B, m, M]``: which of the nodes that the draft reads each of them sees: the root,
        # then k of each level, those of this one last.
        self.seen = torch.ones(batch, 1, 1, dtype=torch.bool)
        self._values = torch.zeros(batch, 1)  # logarithms of path probabilities
        self._places = torch.zeros(batch, 1, dtype=torch.int64)  # among all candidates
        self._first = 1  # place of the next level's first candidate
        # Of each level's candidates ``[B, c]``: the value, the token and the parent's place.
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def add_children(self, scores: Tensor) -> None:
        """Adds the likeliest tokens after each node of the level, as candidates.

        Args:
            scores: float32 ``[B, m, V]``: what Q is the softmax of.
        """
        count, self._vocabulary = min(CHILDREN_ON_CPUS, scores.shape[2]), scores.shape[2]
        # On CPUs this is several times as fast as `logsumexp`.
        best = scores.log_softmax(dim=2).topk(count, dim=2)
        values = (self._values[..., None] + best.values).flatten(1)
        parents = self._places[..., None].expand_as(best.indices).flatten(1)
        self._found.append((values, best.indices.flatten(1), parents))

    def descend(self) -> None:
        """Chooses the nodes of the next level: the likeliest candidates of this one's."""
        values, tokens, _ = self._found[-1]
        self._values, chosen = values.topk(self.width, dim=1)
        self.tokens = tokens.gather(1, chosen)
        self._places = self._first + chosen
        self._first += values.shape[1]
        above = chosen // (values.shape[1] // self.seen.shape[1])
        seen = self.seen.gather(1, above[..., None].expand(-1, -1, self.seen.shape[2]))
        itself = torch.eye(self.width, dtype=torch.bool).expand(len(values), -1, -1)
        self.seen = torch.cat([seen, itself], dim=2)

    def best(self, told: Tensor, most: Tensor, deepest: Tensor) -> SharedNodes:
        """The likeliest candidates of all requests, upper levels first where they are equally
        likely: as many as B trees of ``nodes`` nodes have, and at least one for each.

        Any choice is exact for greedy requests: their verification knows no Q. For sampled ones it
        would not be, as a node would be there because of its own token.

        Args:
            told: int64 ``[B, D]``, see `continuations`. Told tokens are also candidates where the
                draft predicted nothing, down to level D. Each counts as its least share in Q.
            most: int64 ``[B]``: most nodes of each tree below its root.
            deepest: int64 ``[B]``: the level of its deepest node at most.
        """
        values, tokens, parents = (torch.cat(part, 1) for part in zip(*self._found, strict=True))
        # A draft that gives NaN drafts anything. No child may come before its parent.
        values = values.nan_to_num(nan=_LEAST, neginf=_LEAST)
        counts = torch.tensor([found[0].shape[1] for found in self._found])
        levels = torch.arange(1, len(counts) + 1).repeat_interleave(counts).expand_as(tokens)
        if (told[:, 0] >= 0).any():
            candidates = zip((values, tokens, parents, levels), self._added(told), strict=True)
            values, tokens, parents, levels = (torch.cat(part, 1) for part in candidates)
        if (deepest < told.shape[1]).any():
            values = values.masked_fill(levels > deepest[:, None], -torch.inf)
        widest = int(most.max().clamp(max=values.shape[1]))
        own = values.sort(dim=1, descending=True, stable=True)
        best, order = own.values[:, :widest], own.indices[:, :widest]
        exists = (best > -torch.inf) & (torch.arange(widest) < most[:, None])
        best = best.masked_fill(~exists, -torch.inf)
        best[:, 0] = 1.0  # the first of each request comes before all others
        ranks = torch.empty(best.numel(), dtype=torch.int64)
        ranks[best.flatten().argsort(descending=True, stable=True)] = torch.arange(len(ranks))
        places = 1 + ranks.view_as(best) // len(told)
        places = places.masked_fill(~exists | (places >= self.nodes), 0)
        node_at = torch.zeros(len(told), values.shape[1] + 1, dtype=torch.int64)
        node_at.scatter_(1, order + 1, torch.arange(1, widest + 1).expand_as(order))
        above = node_at.gather(1, parents.gather(1, order))
        found = tokens.gather(1, order), above, places
        roots = self._roots, torch.full_like(self._roots, -1), torch.zeros_like(self._roots)
        return SharedNodes(*(torch.cat(part, 1) for part in zip(roots, found, strict=True)))

    def _added(self, told: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values, tokens, parents' places and levels ``[B, D]`` of told tokens that the draft did
        not predict, behind all other candidates. Value -inf: there is none."""
        batch, depth = told.shape
        place, length = torch.zeros(2, batch, 1, dtype=torch.int64)
        value, first = torch.zeros(batch, 1), 1
        for level, (values, tokens, parents) in enumerate(self._found):
            is_next = (parents == place) & (tokens == told[:, level, None]) & (length == level)
            best, column = is_next.max(dim=1, keepdim=True)
            place = torch.where(best, first + column, place)
            value = torch.where(best, values.gather(1, column), value)
            length = length + best
            first += values.shape[1]
        levels = length + torch.arange(1, depth + 1)
        tokens = told.gather(1, (levels - 1).clamp(max=depth - 1))
        exists = (levels <= depth) & (tokens >= 0) & (tokens < self._vocabulary)
        exists = exists.long().cumprod(dim=1).bool()
        likely = (value + math.log(TOLD_SHARE) * torch.arange(1, depth + 1)).nan_to_num(nan=_LEAST)
        likely = likely.clamp(min=_LEAST).masked_fill(~exists, -torch.inf)
        above = torch.cat([place, first + torch.arange(depth - 1).expand(batch, -1)], dim=1)
        return likely, tokens.clamp(min=0), above, levels
