"""Traversal verification (see `traversal`) in torch, for any device.

The names in the code against the plain form for one tree, `testing.verification.traversal`:
``target`` is M, which starts as the target's distribution P; ``draft`` is D, which starts as
the draft's Q; ``chance`` is a, the probability that the path down to a node may be accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_vllm.verification.result import DistributionAt, VerifyResult
from sequoia_vllm.verification.rows import (
    probability_of,
    sample_rows,
    take_rows,
    true_indices,
    without_token,
)
from sequoia_vllm.verification.topology import Topology


def visit_nodes(
    target_at: DistributionAt,
    draft_at: DistributionAt,
    tokens: Tensor,
    topology: Topology,
    uniforms: Tensor,
) -> VerifyResult:
    """`traverse_tree` in torch, for any device and dtype; arguments as there."""
    batch, depths = tokens.shape[0], topology.max_depth + 1
    result = VerifyResult(
        accepted_nodes=tokens.new_full((batch, depths - 1), -1),
        output_tokens=tokens.new_full((batch, depths), -1),
        num_accepted=tokens.new_zeros(batch),
    )
    for tree, requests in _by_tree(topology):
        open_path = _OpenPath(target_at, draft_at, tokens, uniforms, requests.to(tokens.device))
        for node, path, is_entered in _visits(tree):
            if is_entered:
                open_path.enter(node, bool(tree[node]))
            else:
                open_path.leave(path, result)
            if not open_path.requests.numel():
                break
    return result


def _by_tree(topology: Topology) -> Iterator[tuple[list[list[int]], Tensor]]:
    """The different trees of a batch, as the children of each node, and whose they are."""
    parents, tree_of = topology.parents.cpu().unique(dim=0, return_inverse=True)
    for number in range(len(parents)):
        requests = true_indices(tree_of == number)
        table = topology.children[int(requests[0])].tolist()
        yield [[child for child in children if child >= 0] for children in table], requests


def _visits(children: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int], bool]]:
    """Every node twice, on entering and on leaving it: (node, path down to it, is entered)."""

    def visits(node: int, path: list[int]) -> Iterator[tuple[int, list[int], bool]]:
        yield node, path, True
        for child in children[node]:
            yield from visits(child, [*path, child])
        yield node, path, False

    return visits(0, [])


@dataclass
class _Level:
    """One node of the open path, for the A requests that have accepted nothing yet.

    Attributes:
        chance: float64 ``[A]``: the probability that the path down to it may be accepted.
        target: M, ``[A, V]``: what the next token is drawn from, if the path ends here.
        draft: D, ``[A, V]``: what its next child was drawn from; None: it has no children.
        rejected: int64 ``[A, k]``: its children's tokens so far.
    """

    chance: Tensor
    target: Tensor
    draft: Tensor | None
    rejected: Tensor

    def take(self, rows: Tensor) -> None:
        """Keeps these requests only."""
        self.chance, self.target = take_rows(self.chance, rows), take_rows(self.target, rows)
        self.rejected = take_rows(self.rejected, rows)
        self.draft = None if self.draft is None else take_rows(self.draft, rows)


class _OpenPath:
    """The nodes that were entered and not left, from the root down, of requests with one tree.

    Attributes:
        requests: int64 ``[A]``: those that have accepted nothing yet.
    """

    def __init__(
        self,
        target_at: DistributionAt,
        draft_at: DistributionAt,
        tokens: Tensor,
        uniforms: Tensor,
        requests: Tensor,
    ) -> None:
        self.requests = requests
        self._target_at = target_at
        self._draft_at = draft_at
        self._tokens = tokens
        self._uniforms = uniforms
        self._levels: list[_Level] = []

    def enter(self, node: int, has_children: bool) -> None:
        """Goes down to a child of the last node, or to the root."""
        if self._levels:
            above = self._levels[-1]
            assert above.draft is not None
            token = self._tokens[self.requests, node]
            target = above.chance * probability_of(above.target, token)
            draft = probability_of(above.draft, token).double()
            # A child that Q cannot have drawn is certain, unless it is impossible.
            ratio = torch.where(draft > 0, target / draft, torch.where(target > 0, 1.0, 0.0))
            chance = ratio.clamp_(max=1)
        else:
            chance = torch.ones(
                len(self.requests), dtype=torch.float64, device=self.requests.device
            )
        nodes = torch.full_like(self.requests, node)
        self._levels.append(
            _Level(
                chance=chance,
                target=self._target_at(self.requests, nodes),
                draft=self._draft_at(self.requests, nodes) if has_children else None,
                rejected=self._tokens.new_empty(len(self.requests), 0),
            )
        )

    def leave(self, path: list[int], result: VerifyResult) -> None:
        """Accepts the path down to the last node, or rejects that node.

        Args:
            path: Nodes below the root; the last of them is left.
            result: Gets the paths that are accepted.
        """
        last = self._levels.pop()
        if not path:  # the root's chance is 1 whatever was rejected
            self._accept(path, last, torch.arange(len(self.requests)), result)
            self.requests = self.requests[:0]
            return
        accept = self._uniforms[self.requests, path[-1]] < last.chance
        accepted, rejected = true_indices(accept), true_indices(~accept)
        if accepted.numel():
            self._accept(path, last, accepted, result)
            self.requests = self.requests[rejected]
            for level in self._levels:
                level.take(rejected)
        if rejected.numel():
            _reject(self._levels[-1], self._tokens[self.requests, path[-1]])

    def _accept(self, path: list[int], last: _Level, rows: Tensor, result: VerifyResult) -> None:
        rows = rows.to(self.requests.device)
        requests, depth = self.requests[rows], len(path)
        nodes = torch.tensor(path, dtype=torch.int64, device=requests.device)
        result.accepted_nodes[requests, :depth] = nodes
        result.output_tokens[requests, :depth] = self._tokens[requests[:, None], nodes]
        token = sample_rows(take_rows(last.target, rows), self._uniforms[requests, 0])
        result.output_tokens[requests, depth] = token
        result.num_accepted[requests] = depth


def _reject(level: _Level, token: Tensor) -> None:
    """What a node's later children and the node itself get, once the child ``token`` is rejected.

    R = (a M - D)+, S = sum(R); M = R / S; a = S / (S + 1 - a); D without the token.
    """
    assert level.draft is not None
    scaled = level.chance.to(level.target.dtype)[:, None] * level.target
    left = scaled.sub_(level.draft).clamp_(min=0)
    mass = left.sum(dim=1, keepdim=True)
    vanished = mass == 0
    level.target = torch.where(vanished, level.target, left.div_(mass))
    kept = mass.squeeze(1).double()
    # Where nothing is left, a path is impossible; or it was certain, but for rounding.
    nothing = torch.where(level.chance < 1, 0.0, level.chance)
    # 1 - a first: a certain path stays certain to the bit.
    level.chance = torch.where(kept > 0, kept / (kept + (1 - level.chance)), nothing)
    level.rejected = torch.cat([level.rejected, token[:, None]], dim=1)
    level.draft = without_token(level.draft, token, level.rejected)
