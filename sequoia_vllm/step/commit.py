"""Commit: the accepted path's keys and values move to the slots after the root."""

from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.attention.cpu_kernel import CacheGroup, clear_tokens


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
        num_nodes: Tensor,
        accepted_nodes: Tensor,
    ) -> None:
        """Moves the accepted path's keys and values in every layer's cache, in place.

        The j-th accepted node belongs in the slot of node j + 1. Nodes that are in place stay.
        Where a node was not finite, the slots behind the path are cleared.

        Args:
            kv_caches, metadata: Each layer's.
            first_row: int ``[B]``: row of each root in the batch's flat tokens.
            num_nodes: int ``[B]``: nodes of each tree.
            accepted_nodes: int ``[B, D]``, -1 padded.
        """
        self._groups = self._groups or [
            (names[0], CacheGroup([kv_caches[name] for name in names], packed))
            for names in layers_by_cache(kv_caches, metadata)
            for packed in [metadata[names[0]].tree.is_packed(kv_caches[names[0]])]
        ]
        place = torch.arange(1, accepted_nodes.shape[1] + 1)
        moves = (accepted_nodes >= 0) & (accepted_nodes != place)
        rows = first_row[:, None]
        source, target = (rows + accepted_nodes)[moves], (rows + place)[moves]
        for layer, caches in self._groups:
            slots = metadata[layer].slot_mapping
            if len(source):
                caches.move_tokens(slots[source], slots[target])
            if metadata[layer].tree.spoilt:
                node = torch.arange(int(num_nodes.max()))
                is_left = node > (accepted_nodes >= 0).sum(dim=1)[:, None]
                left = slots[(rows + node)[is_left & (node < num_nodes[:, None])]]
                for cache in caches.kv_caches:
                    clear_tokens(cache, left, caches.packed)
