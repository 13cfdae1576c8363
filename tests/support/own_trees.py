"""Trees of request slots' own, as kernels read them, and a mistake in how kernels find them."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.drafting.tree_tables import DraftLevels, TreeTables
from sequoia_vllm.tree import TokenTree

# One, two and one nodes with children at depths 0, 1 and 2.
OWN_TREES = [
    TokenTree(parents)
    for parents in (
        (-1, 0, 0, 1, 1, 2, 3), (-1, 0, 0, 1, 2, 2, 5),
        (-1, 0, 0, 2, 2, 1, 3), (-1, 0, 1, 0, 2, 3, 3),
    )
]  # fmt: skip


class TreeShapes(TreeTables):
    """A tree for each request slot: `TreeTables` as ``[S, ...]``; kernels of V2 read both.

    No setting makes such tables. All trees have as many nodes as the first and, in each prefix
    that is drafted, as many with children at each depth.
    """

    def __init__(self, tree: TokenTree, device: torch.device, slots: int) -> None:
        super().__init__(tree, device)
        self._slots = slots
        self._give_slots(self)
        self.levels_of(tree.num_speculative_tokens)

    def levels_of(self, drafts: int) -> DraftLevels:
        """See `TreeTables.levels_of`; call it before `set`."""
        if drafts not in self._levels:
            levels = super().levels_of(drafts)
            for part in (levels, *levels.levels):
                self._give_slots(part)
        return self._levels[drafts]

    def set(self, slot: int, tree: TokenTree) -> None:
        """Gives a slot another tree, in place: CUDA graphs find it."""
        own = TreeTables(tree, self.ancestors.device)
        for drafts in self._levels:
            own.levels_of(drafts)
        for shapes, shape in zip(_tensors(self), _tensors(own), strict=True):
            shapes[slot] = -1
            shapes[slot, ..., : shape.shape[-1]] = shape

    def _give_slots(self, part: object) -> None:
        for name, shape in list(vars(part).items()):
            if isinstance(shape, Tensor):
                setattr(part, name, shape.repeat(self._slots, *[1] * shape.ndim))


def _tensors(tables: TreeTables) -> Iterator[Tensor]:
    """All tensors of a tree and of its levels, in one order."""
    parts: list[object] = [tables]
    for levels in tables._levels.values():
        parts += [levels, *levels.levels]
    for part in parts:
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))


@triton.jit
def row_of_the_first(slots, request, slot_rows):
    """In the place of `kernels.tree_shapes.shape_row`: all take the first one."""
    return tl.maximum(tl.load(slots), 0).to(tl.int32) * slot_rows
