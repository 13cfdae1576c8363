"""Commit: the accepted path's keys and values move to the slots after the root."""

from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.attention.cpu_kernel import CacheGroup


def accepted_moves(first_row: Tensor, accepted_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the batch whose keys and values must move, and where to, both ``[M]``.

    The j-th accepted node belongs in the slot of node j + 1. Nodes that are in place are left out.

    Args:
        first_row: int ``[B]``: row of each root in the batch's flat tokens.
        accepted_nodes: int ``[B, D]``, -1 padded.
    """
    place = torch.arange(1, accepted_nodes.shape[1] + 1, device=accepted_nodes.device)
    moves = (accepted_nodes >= 0) & (accepted_nodes != place)
    rows = first_row[:, None].expand_as(accepted_nodes)
    return (rows + accepted_nodes)[moves], (rows + place)[moves]


def layers_by_cache(kv_caches: dict[str, Tensor], metadata: dict[str, Any]) -> list[list[str]]:
    """The layers whose tokens move together, in every step: one metadata object, one layout."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, cache in kv_caches.items():
        key = id(metadata[name]), cache.shape, cache.stride(), cache.dtype
        groups.setdefault(key, []).append(name)
    return list(groups.values())


class TargetCaches:
    """The target's caches, grouped by their slot mapping."""

    def __init__(self, kv_caches: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        self._groups = [
            (names[0], CacheGroup([kv_caches[name] for name in names]))
            for names in layers_by_cache(kv_caches, metadata)
        ]

    def move(self, source_rows: Tensor, target_rows: Tensor, metadata: dict[str, Any]) -> None:
        """Moves keys and values in every layer's cache, in place, as `accepted_moves` says."""
        if len(source_rows) == 0:
            return
        for layer, caches in self._groups:
            slots = metadata[layer].slot_mapping
            caches.move_tokens(slots[source_rows], slots[target_rows])
