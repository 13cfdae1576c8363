"""Chunked local attention for `tree_attention`: a node sees its own chunk of positions alone.

A chunk begins at a multiple of its size, and a node's position is its depth after the context. So
requests are given as if they began with their root's chunk. Nodes behind this chunk's end see
neither the context nor nodes before that end.
"""

from typing import Any

import torch

from sequoia_vllm.kernels.node_masks import NodeMask, pack_nodes


def from_chunk(tree: Any, mask: NodeMask, chunk: int, block_size: int) -> dict[str, Any]:
    """What of ``tree`` is another for layers with chunks; waits for nothing on the device.

    Args:
        tree: As in `tree_attention`, without ``max_slots``.
        mask: The tree's without a window. Chunks are longer than it is deep: so it lies in two of
            them at most.
        chunk: Tokens of a chunk, a multiple of ``block_size``.

    Returns:
        ``request_slots``, ``context_lens``, ``block_table``, ``max_keys`` and ``mask``.
    """
    contexts = tree.context_lens % chunk
    words, depths = mask.words, mask.depths
    if words.ndim == 3:
        slots = tree.request_slots.clamp(min=0)
        words, depths = words[slots], depths[slots]
    is_next = depths >= chunk - contexts[:, None]
    words = torch.where(is_next[..., None], words & pack_nodes(is_next)[:, None], words)
    most = chunk + depths.shape[-1]
    columns = torch.arange(-(-most // block_size), device=contexts.device)
    columns = columns + ((tree.context_lens - contexts) // block_size)[:, None]
    last = tree.block_table.shape[1] - 1
    return {
        "request_slots": torch.arange(len(contexts), device=contexts.device),
        "context_lens": contexts,
        "block_table": tree.block_table.gather(1, columns.clamp(max=last).long()),
        "max_keys": min(tree.max_keys, most),
        # Windows of a chunk begin before it; those of nodes in the next one at the root.
        "mask": NodeMask(words, is_next.int() * (chunk - 1), window=chunk),
    }
