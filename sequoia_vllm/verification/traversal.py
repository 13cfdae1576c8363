"""Traversal verification of token trees (arXiv 2505.12398): leaves first, whole paths at once.

On CPUs, by compiled code: see ``traversal.cpp``. GPUs have `sequoia_vllm.kernels.traversal`.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sequoia_vllm.cpp_library import load_library
from sequoia_vllm.verification.topology import DistributionAt, Topology, VerifyResult, topology_of
from sequoia_vllm.verification.walk import node_uniforms, sample_rows, true_indices, walk_tree

_SOURCE = Path(__file__).with_name("traversal.cpp")
# Threads cost more than they save below this many probabilities.
_SERIAL_WORK = 1 << 20
# Most distributions that compiled code gets at once, of P and of Q each.
_MOST_ROWS = 256

Traverse = Callable[[ctypes.Structure], None]


def traverse_tree(
    target_at: DistributionAt,
    draft_at: DistributionAt,
    tokens: Tensor,
    parents: Tensor | Topology,
    generator: torch.Generator | None = None,
) -> VerifyResult:
    """Visits the nodes depth first, and tries each after the last of its children.

    The emitted tokens have the law of sampling the target one token at a time, under the
    conditions of `walk_tree`. They are never fewer on average. A node costs a pass over the
    vocabulary unless it is accepted; a tree as many passes as it has nodes, at most.

    Each request uses one uniform number per node, as `walk_tree` does. The first
    picks the token that ends the path; the i-th after it (from 1) decides node i.

    Without a C++ compiler `walk_tree` verifies the trees instead, and the log says so once.

    Args:
        target_at, draft_at, tokens, parents, generator: See `walk_tree`. Tensors are on the
            CPU. The distributions of any node may be asked for, each once.

    Raises:
        ValueError: See `walk_tree`; or the tensors are not on the CPU.
    """
    if tokens.device.type != "cpu":
        raise ValueError(f"trees on {tokens.device}: this traversal is for tensors on the CPU")
    traverse = load_traversal()
    if traverse is None:
        return walk_tree(target_at, draft_at, tokens, parents, generator)
    topology = topology_of(parents, tokens)
    uniforms = node_uniforms(tokens, generator)
    accepted, last_tokens = torch.empty(2, len(tokens), dtype=torch.int64)
    has_children = (topology.children >= 0).any(dim=2)
    for requests in torch.arange(len(tokens)).split(max(1, _MOST_ROWS // tokens.shape[1])):
        inner = has_children[requests]
        owner, nodes = inner.nonzero(as_tuple=True)
        # Accepted nodes, and what is left of P there, up to a factor: ``[requests, V]``.
        ends, weights = torch.zeros_like(requests), None
        if nodes.numel():
            target, draft = (at(requests[owner], nodes) for at in (target_at, draft_at))
            rows = (inner.flatten().cumsum(0) - 1).view(inner.shape)  # of P and Q, by node
            children = topology.children[requests]
            used = children, tokens[requests], rows, uniforms[requests], target, draft
            # The structure holds addresses: the tensors must live as long.
            given = [values.contiguous() for values in used]
            weights = target.new_empty(len(requests), target.shape[1])
            parallel = len(requests) > 1 and target.numel() > _SERIAL_WORK
            traverse(
                _Trees(
                    *(values.data_ptr() for values in (*given, ends, weights)),
                    *children.shape, target.shape[1], target.dtype == torch.float64,
                    torch.get_num_threads() if parallel else 1,
                )
            )  # fmt: skip
        leaves = true_indices(~has_children[requests, ends])
        if leaves.numel():
            untouched = target_at(requests[leaves], ends[leaves])
            if weights is None:
                weights = untouched.new_empty(len(requests), untouched.shape[1])
            weights[leaves] = untouched
        accepted[requests] = ends
        last_tokens[requests] = sample_rows(weights, uniforms[requests, 0])
    return _result(topology, tokens, accepted, last_tokens)


def _result(
    topology: Topology, tokens: Tensor, accepted: Tensor, last_tokens: Tensor
) -> VerifyResult:
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


class _Trees(ctypes.Structure):
    """The source's ``Trees``: same fields, same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "children", "tokens", "rows", "uniforms", "target", "draft", "accepted", "rest",
        )),
        *((name, ctypes.c_int64) for name in (
            "batch", "nodes", "branches", "vocabulary", "is_float64", "threads",
        )),
    )  # fmt: skip


@cache
def load_traversal() -> Traverse | None:
    """The compiled function; None where it cannot be compiled (logged once)."""
    library = load_library(
        _SOURCE, "verifies by Algorithm 2 instead of traversal, which must be compiled"
    )
    if library is None:
        return None
    traverse = library.sequoia_traverse
    traverse.argtypes, traverse.restype = [ctypes.POINTER(_Trees)], None
    return lambda trees: traverse(ctypes.byref(trees))
