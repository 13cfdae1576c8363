"""Dynamic trees: each request's topology follows the draft's own probabilities, as in EAGLE-2.

A node's *path probability* is the product of Q over the tokens of its path. No node is likelier
than its parent, so the likeliest ones form a tree, and so does every prefix in this order.
docs/trees.md says which requests have such trees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHILDREN_ON_CPUS, CHILDREN_ON_GPUS = 12, 8
"""Children of a node to choose among. With 8 or more nothing is lost at 16 and 32 nodes. With 12,
trees of depth 2 are dynamic with up to 157 nodes, and with 8 with up to 73. GPUs have 8: kernels
need a power of 2, and compare all candidates with each other."""


def inner_width(nodes: int, depth: int, children: int) -> int:
    """Nodes of each level that get children in trees of this size, root included, and depth.

    Of each, so many ``children`` can be chosen. 0: there is too little to choose from, and such
    trees stay static. Without the root, the draft reads fewer nodes than the tree has: they fit in
    its cache slots.
    """
    width = min((nodes - 1) // max(depth - 1, 1), children)
    candidates = min(children, nodes - 1) * (1 + (depth - 1) * width)
    return width if depth > 1 and candidates >= nodes - 1 else 0


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


class DynamicGrowth:
    """Grows B trees of ``nodes`` nodes each, all levels in turn.

    At each level `add_children` takes what the draft predicts at the level's nodes. `descend` then
    chooses those of the next level. In the end `best` gives the trees.

    Args:
        roots: int64 ``[B]``: tokens of the roots.
        nodes: Nodes of each tree, root included.
        depth: Most edges from the root to a leaf; `inner_width`, k, is above 0.
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
        count = min(CHILDREN_ON_CPUS, self.nodes - 1, scores.shape[2])
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

    def best(self) -> tuple[Tensor, Tensor]:
        """The likeliest of all candidates, upper levels first where they are equally likely.

        int64 ``[B, nodes]`` each: tokens, the root's first, and parents.
        """
        values, tokens, parents = (torch.cat(part, 1) for part in zip(*self._found, strict=True))
        # A draft that gives NaN drafts anything. No child may come before its parent.
        values = values.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        order = values.sort(dim=1, descending=True, stable=True).indices[:, : self.nodes - 1]
        node_at = torch.zeros(len(values), values.shape[1] + 1, dtype=torch.int64)
        node_at.scatter_(1, order + 1, torch.arange(1, self.nodes).expand_as(order))
        above = node_at.gather(1, parents.gather(1, order))
        no_parent = torch.full_like(self._roots, -1)
        chosen = torch.cat([self._roots, tokens.gather(1, order)], dim=1)
        return chosen, torch.cat([no_parent, above], dim=1)
