"""Look-up tables of trees for verifiers, and the form of their answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

ROOT = -1
"""The root's entry in ``parents``."""
PADDING = -2
"""The entry of padding, where a tree is smaller than the batch's largest."""

DistributionAt = Callable[[Tensor, Tensor], Tensor]
"""``(requests[A], nodes[A]) -> float32 [A, V]``, a fresh tensor: the caller writes in it."""


@dataclass(frozen=True)
class Topology:
    """The shapes of a batch's trees, as the verifier looks them up."""

    parents: Tensor  # int64 ``[B, N+1]``: as given
    depths: Tensor  # int64 ``[B, N+1]``: edges from the root; 0 in padding
    children: Tensor
    """int64 ``[B, N+1, b]``: the k-th child of each node in draft order, -1 where it has no k-th
    child; b is at least 1."""
    branches: tuple[int, ...]
    """Most children of any node at each depth. One entry per depth, so the last is 0."""

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node of the batch, in edges."""
        return len(self.branches) - 1

    @cached_property
    def ancestors_up(self) -> tuple[Tensor, ...]:
        """int64 ``[B, N+1]`` each: the ancestor 1, 2, 4, ... edges up, or the root; at least one.

        There are as many as reach the root from the deepest node.
        """
        up = [self.parents.clamp(min=0)]
        while 1 << len(up) <= self.max_depth:
            up.append(up[-1].gather(1, up[-1]))
        return tuple(up)

    @classmethod
    def from_parents(cls, parents: Tensor, device: torch.device | None = None) -> Topology:
        """Builds the look-ups, on the host: one copy down and one up.

        An engine whose trees stay the same builds this once, and passes it for ``parents``.

        Args:
            parents: Integer ``[B, N+1]``; -1 for the root (node 0), -2 for padding (after the
                tree's last node), else the parent's index, which is below the node's own. Siblings
                are drafts in index order.
            device: Where it goes; the device of ``parents`` if None.

        Raises:
            ValueError: A row is not a tree in this form; the message names the node.
        """
        host = parents.detach().to("cpu", torch.int64)
        _check_parents(host)
        children, depths = _child_table(host), _depths(host)
        counts, deepest = (children >= 0).sum(dim=2), int(depths.max()) if depths.numel() else 0
        most = (counts[depths == depth].max() if len(host) else 0 for depth in range(deepest + 1))
        return cls(host, depths, children, tuple(map(int, most))).to(device or parents.device)

    def to(self, device: torch.device) -> Topology:
        """This topology with its tensors on ``device``."""
        if self.children.device == device:
            return self
        moved = {name: getattr(self, name).to(device) for name in ("parents", "depths", "children")}
        return replace(self, **moved)


def topology_of(parents: Tensor | Topology, tokens: Tensor) -> Topology:
    """The look-ups of these trees, on the device of ``tokens``.

    Raises:
        ValueError: ``parents`` does not hold trees, or differs from ``tokens`` in shape.
    """
    if isinstance(parents, Topology):
        topology = parents.to(tokens.device)
    else:
        topology = Topology.from_parents(parents, tokens.device)
    if topology.children.shape[:2] != tokens.shape:
        raise ValueError(
            f"tokens are {list(tokens.shape)} but parents {list(topology.children.shape[:2])}"
        )
    return topology


@dataclass(frozen=True)
class VerifyResult:
    """The decisions of verification, for B requests whose deepest tree has depth D."""

    accepted_nodes: Tensor  # int64 ``[B, D]``: the accepted path below the root, then -1
    output_tokens: Tensor
    """int64 ``[B, D + 1]``: the tokens of that path, the target's own token after it, then -1."""
    num_accepted: Tensor  # int64 ``[B]``: length of the path; one token more is emitted


def drawn_at(accepted_nodes: Tensor) -> Tensor:
    """The node whose logits each token of a path was drawn from; the root's beyond its end.

    Token j of a path was drawn at its node j - 1, and the first at the root. ``accepted_nodes`` are
    integers ``[B, D]``, padded with -1, and the answer is ``[B, D + 1]``.
    """
    return torch.nn.functional.pad(accepted_nodes.clamp(min=0), (1, 0))


def _check_parents(parents: Tensor) -> None:
    if parents.dim() != 2 or parents.shape[1] == 0:
        raise ValueError(f"parents must be [requests, nodes], not {list(parents.shape)}")
    indices = torch.arange(parents.shape[1], device=parents.device)
    padding = parents == PADDING
    wrong = (parents >= indices) | (parents < PADDING)
    wrong |= (parents == ROOT) != (indices == 0)
    wrong[:, 1:] |= padding[:, :-1] & ~padding[:, 1:]
    if wrong.any():
        request, node = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"request {request}: node {node} has parent {int(parents[request, node])}; node 0 "
            f"must have -1, a later node one before it, and padding (-2) only comes at the end"
        )


def _child_table(parents: Tensor) -> Tensor:
    batch, nodes = parents.shape
    # Sorted by parent, siblings are neighbours and still in draft order; a node's
    # rank is its distance from the first entry with the same parent.
    sorted_parents, order = parents.sort(dim=1, stable=True)
    positions = torch.arange(nodes, device=parents.device)
    ranks = positions - torch.searchsorted(sorted_parents, sorted_parents)
    request, position = (sorted_parents >= 0).nonzero(as_tuple=True)
    rank = ranks[request, position]
    width = int(rank.max()) + 1 if rank.numel() else 1
    table = parents.new_full((batch, nodes, width), -1)
    table[request, sorted_parents[request, position], rank] = order[request, position]
    return table


def _depths(parents: Tensor) -> Tensor:
    depths = torch.zeros_like(parents)
    ancestors = parents
    while bool((ancestors >= 0).any()):
        depths += ancestors >= 0
        above = parents.gather(1, ancestors.clamp(min=0))
        ancestors = torch.where(ancestors >= 0, above, ancestors)
    return depths
