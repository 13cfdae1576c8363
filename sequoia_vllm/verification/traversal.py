"""Traversal verification of token trees (arXiv 2505.12398): leaves first, whole paths at once."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia_vllm.verification.randomness import Generators, node_uniforms
from sequoia_vllm.verification.result import DistributionAt, VerifyResult, topology_of
from sequoia_vllm.verification.rows import sample_rows, true_indices
from sequoia_vllm.verification.topology import Topology
from sequoia_vllm.verification.traversal_compiled import Traverse, load_traversal, traverse_rows
from sequoia_vllm.verification.traversal_in_torch import visit_nodes

# Distributions that compiled code has at hand at once, twice: P and Q.
_MOST_ROWS = 256


def traverse_tree(
    target_at: DistributionAt,
    draft_at: DistributionAt,
    tokens: Tensor,
    parents: Tensor | Topology,
    generators: Generators = None,
) -> VerifyResult:
    """Visits the nodes depth first, and tries each after the last of its children.

    The emitted tokens have the law of sampling the target one token at a time, under the
    conditions of `walk_tree`, and are never fewer on average. A node costs a pass over the
    vocabulary unless it is accepted; a tree as many passes as it has nodes, at most.

    Each request uses one uniform number per node of its tree, as `walk_tree`: the first picks
    the token that ends the path, the i-th after it (from 1) decides node i.

    On CPUs that is compiled code, where there is a C++ compiler, and else torch.

    Args:
        target_at, draft_at, tokens, parents, generators: As of `walk_tree`, but that the
            distributions of any node may be asked for, each once.

    Raises:
        ValueError: As `walk_tree`.
    """
    topology = topology_of(parents, tokens)
    uniforms = node_uniforms(tokens.shape, topology, generators)
    traverse = load_traversal() if tokens.device.type == "cpu" else None
    if traverse is None:
        return visit_nodes(target_at, draft_at, tokens, topology, uniforms)
    accepted, last_tokens = torch.empty(2, len(tokens), dtype=torch.int64)
    has_children = (topology.children >= 0).any(dim=2)
    for requests in torch.arange(len(tokens)).split(max(1, _MOST_ROWS // tokens.shape[1])):
        accepted[requests], last_tokens[requests] = _traverse(
            traverse, target_at, draft_at, requests, tokens, topology, has_children, uniforms
        )
    return _result(topology, tokens, accepted, last_tokens)


def _traverse(
    traverse: Traverse,
    target_at: DistributionAt,
    draft_at: DistributionAt,
    requests: Tensor,
    tokens: Tensor,
    topology: Topology,
    has_children: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """The last nodes that these requests accept, and the target's tokens after them."""
    inner = has_children[requests]
    owner, nodes = inner.nonzero(as_tuple=True)
    accepted = torch.zeros_like(requests)
    weights = None
    if nodes.numel():
        accepted, weights = traverse_rows(
            traverse,
            target=target_at(requests[owner], nodes),
            draft=draft_at(requests[owner], nodes),
            rows=(inner.flatten().cumsum(0) - 1).view(inner.shape),
            tokens=tokens[requests],
            children=topology.children[requests],
            uniforms=uniforms[requests],
        )
    leaves = true_indices(~has_children[requests, accepted])
    if leaves.numel():
        untouched = target_at(requests[leaves], accepted[leaves])
        weights = (
            untouched.new_empty(len(requests), untouched.shape[1]) if weights is None else weights
        )
        weights[leaves] = untouched
    return accepted, sample_rows(weights, uniforms[requests, 0])


def _result(
    topology: Topology, tokens: Tensor, accepted: Tensor, last_tokens: Tensor
) -> VerifyResult:
    """The paths down to the accepted nodes."""
    requests = torch.arange(len(tokens))
    count = topology.depths[requests, accepted]
    path = tokens.new_full((len(tokens), topology.max_depth), -1)
    emitted = tokens.new_full((len(tokens), topology.max_depth + 1), -1)
    emitted[requests, count] = last_tokens
    node = accepted
    for depth in range(topology.max_depth, 0, -1):
        there = true_indices(count >= depth)
        path[there, depth - 1] = node[there]
        emitted[there, depth - 1] = tokens[there, node[there]]
        node[there] = topology.parents[there, node[there]]
    return VerifyResult(path, emitted, count)
