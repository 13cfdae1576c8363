"""Commit: the accepted path's keys and values move to the slots after the root."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sequoia_vllm.attention.cpu_cache import move_tokens
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


def move_accepted(
    source_rows: Tensor, target_rows: Tensor, layers: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Moves keys and values in every layer's cache, in place.

    Args:
        source_rows, target_rows: From `accepted_moves`.
        layers: Each target layer's cache and the step's slot mapping for it.
    """
    if len(source_rows) == 0:
        return
    for kv_cache, slot_mapping in layers:
        move_tokens(kv_cache, slot_mapping[source_rows], slot_mapping[target_rows])
