"""Commit: the accepted path's keys and values move to the slots after the root."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.attention.cpu_kernel import CacheGroup
from sequoia_vllm.engine.drafts import ScheduledTrees


def accepted_moves(trees: ScheduledTrees, accepted_nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the batch whose keys and values must move, and where to.

    The j-th accepted node belongs in the slot that node j + 1 was scored in.

    Args:
        trees: This step's trees.
        accepted_nodes: int64 ``[B, D]``, -1 padded.

    Returns:
        Source and target rows in the batch's flat tokens, both int64 ``[M]``;
        nodes that already are in place are left out.
    """
    place = torch.arange(1, accepted_nodes.shape[1] + 1, device=accepted_nodes.device)
    moves = (accepted_nodes >= 0) & (accepted_nodes != place)
    first_row = trees.first_row[:, None].expand_as(accepted_nodes)
    return (first_row + accepted_nodes)[moves], (first_row + place)[moves]


class TargetCaches:
    """The target's caches, grouped by who shares a slot mapping.

    Args:
        kv_caches: Each target layer's cache, by name.
        metadata: Each layer's attention metadata of some step; layers that
            share one object now do so in every step.
    """

    def __init__(self, kv_caches: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        groups: dict[tuple[int, torch.Size], list[str]] = {}
        for name, kv_cache in kv_caches.items():
            groups.setdefault((id(metadata[name]), kv_cache.shape), []).append(name)
        self._groups = [
            (names[0], CacheGroup([kv_caches[name] for name in names])) for names in groups.values()
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
