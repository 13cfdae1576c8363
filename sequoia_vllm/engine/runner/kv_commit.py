"""Commit: the accepted path's keys and values move to the slots after the root."""

from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.attention.cpu_kernel import CacheGroup


def accepted_moves(first_row: Tensor, accepted_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the batch whose keys and values must move, and where to.

    The j-th accepted node belongs in the slot that node j + 1 was scored in.

    Args:
        first_row: int ``[B]``: row of each root in the batch's flat tokens.
        accepted_nodes: int ``[B, D]``, -1 padded.

    Returns:
        Source and target rows in the batch's flat tokens, both ``[M]``;
        nodes that already are in place are left out.
    """
    place = torch.arange(1, accepted_nodes.shape[1] + 1, device=accepted_nodes.device)
    moves = (accepted_nodes >= 0) & (accepted_nodes != place)
    rows = first_row[:, None].expand_as(accepted_nodes)
    return (rows + accepted_nodes)[moves], (rows + place)[moves]


def layers_by_cache(kv_caches: dict[str, Tensor], metadata: dict[str, Any]) -> list[list[str]]:
    """The layers whose tokens move together: one slot mapping, caches of one layout.

    Args:
        metadata: Each layer's attention metadata of some step; layers that
            share one object now do so in every step.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, cache in kv_caches.items():
        key = id(metadata[name]), cache.shape, cache.stride(), cache.dtype
        groups.setdefault(key, []).append(name)
    return list(groups.values())


class TargetCaches:
    """The target's caches, grouped by their slot mapping.

    Made in the first step that has trees; `move` is called once in each such step, after
    verification.
    """

    def __init__(self, kv_caches: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        self._groups = [
            (names[0], CacheGroup([kv_caches[name] for name in names]))
            for names in layers_by_cache(kv_caches, metadata)
        ]

    def move(self, source_rows: Tensor, target_rows: Tensor, metadata: dict[str, Any]) -> None:
        """Moves keys and values in every layer's cache, in place.

        Args:
            source_rows, target_rows: From `accepted_moves`.
            metadata: Each layer's attention metadata of this step.
        """
        if len(source_rows) == 0:
            return
        for layer, caches in self._groups:
            slots = metadata[layer].slot_mapping
            caches.move_tokens(slots[source_rows], slots[target_rows])
