"""Commit: the accepted path's keys and values move to the slots after the root."""

from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.attention.cpu_kernel import CacheGroup


def layers_by_cache(kv_caches: dict[str, Tensor], metadata: dict[str, Any]) -> list[list[str]]:
    """The layers whose tokens move together, in every step: one metadata object, one layout."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, cache in kv_caches.items():
        key = id(metadata[name]), cache.shape, cache.stride(), cache.dtype
        groups.setdefault(key, []).append(name)
    return list(groups.values())


class TargetCaches:
    """Moves keys and values in the target's caches, which are grouped in the first step."""

    def __init__(self) -> None:
        self._groups: list[tuple[str, CacheGroup]] = []

    def commit(
        self,
        kv_caches: dict[str, Tensor],
        metadata: dict[str, Any],
        first_row: Tensor,
        accepted_nodes: Tensor,
    ) -> None:
        """Moves the accepted path's keys and values in every layer's cache, in place.

        The j-th accepted node belongs in the slot of node j + 1. Nodes that are in place stay.

        Args:
            kv_caches, metadata: Each layer's.
            first_row: int ``[B]``: row of each root in the batch's flat tokens.
            accepted_nodes: int ``[B, D]``, -1 padded.
        """
        self._groups = self._groups or [
            (names[0], CacheGroup([kv_caches[name] for name in names]))
            for names in layers_by_cache(kv_caches, metadata)
        ]
        place = torch.arange(1, accepted_nodes.shape[1] + 1)
        moves = (accepted_nodes >= 0) & (accepted_nodes != place)
        if not moves.any():
            return
        rows = first_row[:, None].expand_as(accepted_nodes)
        source, target = (rows + accepted_nodes)[moves], (rows + place)[moves]
        for layer, caches in self._groups:
            slots = metadata[layer].slot_mapping
            caches.move_tokens(slots[source], slots[target])
