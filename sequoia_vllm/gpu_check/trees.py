"""The trees that are grown and verified here, and their tables on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_vllm.drafting.levels import DraftLevels, child_table, inner_rows
from sequoia_vllm.tree import TokenTree, optimize_tree
from sequoia_vllm.tree.published import REFERENCE_ACCEPTANCE


def best_tree(size: int, depth: int) -> TokenTree:
    """The best tree of this size for the authors' published acceptance vector."""
    return optimize_tree(REFERENCE_ACCEPTANCE, size, depth)


def level_tree(width: int) -> TokenTree:
    """A root with ``width`` children, each of which has two: its level 1 is that wide."""
    grandchildren = [1 + node for node in range(width) for _ in range(2)]
    return TokenTree((-1, *[0] * width, *grandchildren))


@dataclass(frozen=True)
class TreeTables:
    """A tree as the kernels take it.

    Attributes:
        tree: The tree.
        levels: For drafting.
        children: int32 ``[N, b]``: children of each node, then -1.
        inner_index: int32 ``[N]``: row of each node's Q; -1: a leaf.
        ancestors: bool ``[N, N]``.
        depths: int32 ``[N]``.
    """

    tree: TokenTree
    levels: DraftLevels
    children: Tensor
    inner_index: Tensor
    ancestors: Tensor
    depths: Tensor

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device) -> TreeTables:
        """Makes the tables."""
        rows = inner_rows(tree)
        return cls(
            tree=tree,
            levels=DraftLevels(tree, rows, device),
            children=child_table(tree, device),
            inner_index=torch.tensor(rows, dtype=torch.int32, device=device),
            ancestors=torch.tensor(tree.ancestor_mask, device=device),
            depths=torch.tensor(tree.depths.tolist(), dtype=torch.int32, device=device),
        )

    @property
    def num_inner(self) -> int:
        """Nodes with children."""
        return self.levels.num_inner
