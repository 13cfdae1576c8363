"""Paths: what a node's own text is, from the root down to it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_vllm.step.score import StepState


@dataclass(frozen=True)
class NodePaths:
    """M nodes of any requests, each with its path."""

    rows: Tensor  # int64 ``[M]``: each node's row in the step's logits
    requests: Tensor  # int64 ``[M]``: the batch index of each node's request
    depths: Tensor  # int64 ``[M]``: each node's depth
    paths: Tensor  # int64 ``[M, D]``: tokens from the root's child down to the node itself, then -1

    def generated(self, before: int) -> Tensor:
        """Tokens generated up to each node, int64 ``[M]``, where the root is number ``before``."""
        return self.depths + before

    def own_tokens(self) -> list[list[int]]:
        """The paths, as lists without padding."""
        return [[token for token in path if token >= 0] for path in self.paths.tolist()]


def node_paths(trees: StepState, chosen: Tensor) -> NodePaths:
    """Paths of all nodes of the chosen trees; ``chosen``: bool ``[B]``."""
    tree, node = (trees.is_node & chosen[:, None]).nonzero(as_tuple=True)
    steps = _steps(trees)[tree, node]  # [M, D]
    tokens = trees.tokens[tree[:, None], steps.clamp(min=0)]
    return NodePaths(
        rows=trees.logits_rows[tree, node],
        requests=trees.requests[tree],
        depths=trees.depths[tree, node],
        paths=torch.where(steps >= 0, tokens, -1),
    )


def drafted_nodes(trees: StepState, place: int) -> list[tuple[int, int, int]]:
    """Parent, depth and token of each node below a root in stored order, of the tree at a place."""
    below = slice(1, int(trees.num_nodes[place]))
    of_nodes = (each[place, below].tolist() for each in (trees.parents, trees.depths, trees.tokens))
    return list(zip(*of_nodes, strict=True))


def _steps(trees: StepState) -> Tensor:
    """int64 ``[B, N, D]``: nodes from the root's child down to each node itself, then -1."""
    nodes = torch.arange(trees.tokens.shape[1])
    on_path = trees.ancestors & (nodes > 0)  # all but the root
    size = (*trees.tokens.shape, int(trees.depths.max()) + 1)
    # Column d is for the ancestor of depth d + 1. The last one collects what is on no path.
    column = torch.where(on_path, trees.depths[:, None] - 1, size[2] - 1)
    steps = torch.full(size, -1)
    steps.scatter_(2, column, torch.where(on_path, nodes, -1).expand_as(column))
    return steps[..., :-1]
