"""Trees over sparse attention: a node chooses among the context and its ancestors.

A sparse layer's indexer scores all tokens in the cache, and the layer attends to the best of them.
vLLM's operators take each row's scores by slot, and how many of them count. Node i of a request
with c committed tokens has slot c + i. Between the slots of its ancestors lie those of other nodes.

So the scores of ancestors move together first, behind those of the context, in the path's order.
A node's row then has the scores and the length that plain decoding of its path has. vLLM's operator
chooses among them. What it chose behind the context turns back into slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCALE_BYTES = 4  # of an indexer's key
_NOWHERE = torch.iinfo(torch.int32).max  # a context's end that no chosen token lies behind


class AncestorScores:
    """Where the scores of a step's nodes lie, in buffers that stay in place for CUDA graphs.

    Args:
        rows: The most rows of a step that are nodes, roots included.
        ancestors: bool ``[N, N]``, or ``[S, N, N]``, of whose first tree none is deeper.
    """

    def __init__(self, rows: int, ancestors: Tensor) -> None:
        first = ancestors[0] if ancestors.ndim == 3 else ancestors
        longest, device = int(first.sum(dim=1).max()), ancestors.device

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        # int64 ``[rows, longest]``: of the nodes on a row's path, then of its own again: the slots,
        # and the places behind the context. Of other rows zeros, which change nothing.
        self._slots = buffer(longest, dtype=torch.int64)
        self._places = buffer(longest, dtype=torch.int64)
        self._lengths = buffer(dtype=torch.int32)  # ``[rows]``: tokens of the path; 0: no node
        self._contexts = buffer(dtype=torch.int32)  # ``[rows]``: tokens before the root

    def place(self, starts: Tensor, contexts: Tensor, ancestors: Tensor) -> None:
        """Notes the trees of R requests, whose rows come first; waits for nothing on the device.

        Args:
            starts: int32 ``[R + 1]``: first row of each request, then the end.
            contexts: int32 ``[R]``: tokens in the cache before each root.
            ancestors: bool ``[N, N]``, or ``[R, N, N]`` by request: which nodes each sees, itself
                included.
        """
        rows, longest = self._slots.shape
        row = torch.arange(rows, device=starts.device)
        request = torch.searchsorted(starts[1:], row.int(), right=True)
        is_node = request < len(contexts)
        request = request.clamp(max=len(contexts) - 1)
        node = torch.where(is_node, row - starts[request], 0)
        seen = ancestors[node] if ancestors.ndim == 2 else ancestors[request, node]
        depth = seen.sum(dim=1) - 1
        # A path's nodes rise, so they are what a node sees, in order.
        path = torch.argsort(~seen, dim=1, stable=True)[:, :longest]
        by_depth = torch.arange(longest, device=starts.device).minimum(depth[:, None])
        context = contexts[request]
        for buffer, nodes in (self._slots, path.gather(1, by_depth)), (self._places, by_depth):
            buffer.copy_(torch.where(is_node[:, None], context[:, None] + nodes, 0))
        self._lengths.copy_(torch.where(is_node, context + depth + 1, 0))
        self._contexts.copy_(torch.where(is_node, context, _NOWHERE))

    def bring_together(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """Moves ancestors' scores behind those of the contexts, in place.

        Args:
            scores: ``[T, L]``, by slot of a row's request: of nodes, then of other rows.
            lengths: int32 ``[T]``: how many of each row's count, if it is no node.

        Returns:
            int32 ``[T]``: how many count.
        """
        nodes = scores[: len(self._slots)]
        own, slots, places = (
            each[: len(nodes)] for each in (self._lengths, self._slots, self._places)
        )
        nodes.scatter_(1, places, nodes.gather(1, slots))
        found = lengths.clone()
        found[: len(nodes)] = torch.where(own > 0, own, found[: len(nodes)])
        return found

    def to_slots(self, chosen: Tensor) -> None:
        """Turns chosen places into slots, in place.

        Args:
            chosen: int32 ``[T, k]``, of all rows; -1 where a row has fewer tokens.
        """
        nodes = chosen[: len(self._slots)]
        slots, contexts = self._slots[: len(nodes)], self._contexts[: len(nodes), None]
        depth = nodes - contexts
        on_path = slots.gather(1, depth.clamp(0, slots.shape[1] - 1).long())
        nodes.copy_(torch.where(depth >= 0, on_path.int(), nodes))


def parts_of_keys(cache: Tensor) -> tuple[Tensor, Tensor]:
    """An indexer's keys, and their scales, which lie behind all keys of a block.

    Args:
        cache: vLLM's, uint8 ``[blocks, slots, D + 4]``.

    Returns:
        Views ``[blocks, 1, slots, D]`` and ``[blocks, 1, slots, 4]``.
    """
    blocks, slots, width = cache.shape
    size, block, first = width - _SCALE_BYTES, cache.stride(0), cache.storage_offset()
    keys = cache.as_strided((blocks, 1, slots, size), (block, block, size, 1), first)
    scales = (blocks, 1, slots, _SCALE_BYTES), (block, block, _SCALE_BYTES, 1)
    return keys, cache.as_strided(*scales, first + slots * size)
