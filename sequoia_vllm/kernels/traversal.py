"""Traversal verification on the GPU: a launch per wave of nodes, and nothing waits for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from sequoia_vllm.kernels.traversal_kernels import NEVER, NUM_STATES, path_kernel, wave_kernel
from sequoia_vllm.kernels.tree_shapes import only_shape
from sequoia_vllm.kernels.verify import NUM_WARPS, TreesToVerify, lane_constants, walk

# Tokens of the vocabulary that one program of a wave reads.
_PART = 4096
_NUM_WARPS = 4


@dataclass(frozen=True)
class TraversalOrder:
    """When each node of a tree is visited; requests have the tree or its first nodes.

    The k-th child (from 0) of a node has its turn k + 1 waves after the node's own: then its
    earlier siblings are rejected. A node is closed in the wave after its last child's turn.
    """

    nodes: Tensor
    """int32 ``[N, 6]``: parent, rank, previous sibling (-1: none), depth; and places in the order
    in which paths are tried, of the first leaf at or below the node, and of the node itself."""
    decided_in: Tensor  # int32 ``[2, N]``: the wave of a node's turn, and the one that closes it
    waves: Sequence[Tensor]
    """For each: int32 ``[n]``, nodes whose turn it is; or -node: it is closed. Nodes ascending."""
    sizes: Sequence[NDArray[np.int64]]  # for each: the nodes of ``waves`` on the host

    @classmethod
    def of(cls, parents: Sequence[int], device: torch.device) -> TraversalOrder:
        """The order of one tree.

        Args:
            parents: Each node's parent, -1 for the root; below the node's own index.
        """
        count = len(parents)
        children: list[list[int]] = [[] for _ in parents]
        sizes = [1] * count  # nodes of each subtree
        for node in range(1, count):
            children[parents[node]].append(node)
        for node in range(count - 1, 0, -1):
            sizes[parents[node]] += sizes[node]
        nodes = np.full((count, 6), -1, dtype=np.int32)
        turns = np.full((2, count), NEVER.value, dtype=np.int32)
        nodes[0, 3:5], turns[0, 0] = 0, -1
        for node, own in enumerate(children):
            begin = nodes[node, 4]
            for rank, child in enumerate(own):
                turns[0, child] = turns[0, node] + 1 + rank
                turns[1, node] = turns[0, child] + 1
                previous = own[rank - 1] if rank else -1
                nodes[child, :5] = node, rank, previous, nodes[node, 3] + 1, begin
                begin += sizes[child]
        nodes[:, 5] = nodes[:, 4] + sizes - 1
        # The root has no turn, and is accepted where nothing else is.
        turns[:, 0] = NEVER.value
        waves = []
        for wave in range(turns[turns < NEVER.value].max(initial=-1) + 1):
            turn, closed = (np.flatnonzero(row == wave) for row in turns)
            waves.append(np.array(sorted([*turn, *-closed], key=abs)))
        return cls(
            nodes=torch.from_numpy(nodes).to(device),
            decided_in=torch.from_numpy(turns).to(device),
            waves=[torch.from_numpy(wave).to(device, torch.int32) for wave in waves],
            sizes=[np.abs(wave) for wave in waves],
        )


def traverse_trees(
    trees: TreesToVerify,
    order: TraversalOrder,
    *,
    any_sampled: bool = True,
    any_matched: bool = True,
    most_nodes: int | None = None,
) -> None:
    """Verifies requests in mode SAMPLED by traversal, and others as `verify_trees` does.

    Args:
        trees, any_sampled, any_matched, most_nodes: See `verify_trees`.
        order: The order of the tree of ``trees.children``.

    Raises:
        ValueError: See `TreesToVerify.check`; or requests have trees of their own.
    """
    trees.check()
    only_shape(trees.children, 2, "verification by traversal")
    if any_matched:
        walk(trees, walks_sampled=False)
    if any_sampled and len(trees.num_sampled) > 0:
        _traverse(trees, order, trees.most_nodes(most_nodes))


def _traverse(trees: TreesToVerify, order: TraversalOrder, most_nodes: int) -> None:
    """Launches the waves of nodes, then the paths. Requests in other modes are not touched."""
    requests, vocabulary, device = len(trees.num_sampled), trees.vocabulary, trees.logits.device
    lanes = lane_constants(vocabulary, trees.sampled_tokens.shape[1])
    nodes, num_parts = len(order.nodes), triton.cdiv(vocabulary, _PART)
    states = torch.empty(requests, nodes, NUM_STATES.value, dtype=torch.float64, device=device)
    partials = torch.empty(requests, nodes, num_parts, 2, dtype=torch.float32, device=device)
    decisions = torch.empty(requests, 2, nodes, dtype=torch.int32, device=device)
    of_both = {
        **trees.read, "statistics": trees.target_statistics(most_nodes),
        "num_nodes_launched": most_nodes, "node_table": order.nodes, "nodes": nodes,
        "decided_in": order.decided_in, "states": states, "partials": partials,
        "decisions": decisions, "num_parts": num_parts, "BLOCKS": lanes.pop("BLOCKS"),
        "PARTS": triton.next_power_of_2(num_parts), "NODES": triton.next_power_of_2(nodes),
    }  # fmt: skip
    for wave, (visits, sizes) in enumerate(zip(order.waves, order.sizes, strict=True)):
        if num_visits := int(np.searchsorted(sizes, most_nodes)):
            wave_kernel[(requests * num_visits, num_parts)](
                **of_both, visits=visits, num_visits=num_visits, wave=wave,
                PART=_PART, num_warps=_NUM_WARPS,
            )  # fmt: skip
    path_kernel[(requests,)](
        **of_both, **trees.written, wave=len(order.waves), **lanes, num_warps=NUM_WARPS
    )
