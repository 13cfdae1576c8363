"""Runs logits processors of the engine's user on trees of Model Runner V2."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.tree import TokenTree


class Chains:
    """Runs a processor of the user's on trees: each path to a leaf is a chain of drafts to it.

    vLLM's processors take the rows before a row of the same request for its history. Rows on
    several paths are computed as often. Waits for nothing on the device.
    """

    def __init__(self, processor: Any, tables: TreeTables) -> None:
        self._processor, self._tables = processor, tables
        self._ends = cache(partial(_ends, tables.tree, tables.parents.ndim == 2))
        self.add_request = processor.add_request
        self.apply_staged_writes = processor.apply_staged_writes

    def apply(self, logits: Tensor, context: LogitsContext) -> Tensor:
        """Replaces the processor's `apply`, of float32 logits ``[T, V]``."""
        total, slots = len(logits), context.idx_mapping.long()
        if total == len(slots):  # no drafts
            found: Tensor = self._processor.apply(logits, context)
            return found
        nodes = context.expanded_local_pos.long()
        rows, request = torch.arange(total, device=nodes.device), (nodes == 0).cumsum(0) - 1
        first = torch.empty_like(slots).scatter_(0, request, rows - nodes)[:, None]
        count = torch.zeros_like(slots).scatter_add_(0, request, torch.ones_like(nodes))[:, None]
        width = self._tables.tree.depth + 1
        places = torch.arange(width, device=nodes.device).to(context.expanded_local_pos.dtype)
        places = places.repeat(len(slots))
        found = logits.new_empty(total + 1, logits.shape[1])  # one row more, for padding
        for end in self._ends(total - len(slots) + 1):
            path = self._path(end, slots)
            is_node = (path >= 0) & (path < count)
            place = (first + torch.where(is_node, path, 0)).flatten()
            chains = replace(
                context,
                expanded_idx_mapping=context.idx_mapping.repeat_interleave(width),
                expanded_local_pos=places,
                input_ids=context.input_ids[place],
                pos=context.pos[place],
            )
            edited = self._processor.apply(logits[place], chains)
            found[torch.where(is_node.flatten(), place, total)] = edited
        return found[:total]

    def _path(self, end: int, slots: Tensor) -> Tensor:
        """Nodes from the root to this one, then -1: int64 ``[R, D + 1]``."""
        above = self._tables.ancestors
        on_path = above[slots, end] if above.ndim == 3 else above[end].expand(len(slots), -1)
        width = self._tables.tree.depth + 1
        column = torch.where(on_path, on_path.cumsum(1) - 1, width)  # parents come first
        nodes = torch.arange(on_path.shape[1], device=slots.device).expand_as(column)
        paths = nodes.new_full((len(slots), width + 1), -1)
        return paths.scatter_(1, column, nodes)[:, :width]


def _ends(tree: TokenTree, is_dynamic: bool, most: int) -> list[int]:
    """Nodes whose paths have all of the first ``most`` nodes; dynamic trees' may be any."""
    nodes = range(min(most, tree.size))
    inner = set() if is_dynamic else set(tree.parents[: len(nodes)])
    return [node for node in nodes if node not in inner]
