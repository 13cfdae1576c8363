"""Dynamic trees on a device: the levels that the draft grows, and tables that each step rewrites.

All memory stays in place, so CUDA graphs may hold it. `dynamic_trees` says what is chosen.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton
from torch import Tensor

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.dynamic_trees import CHILDREN_ON_GPUS as CHILDREN
from sequoia_vllm.drafting.dynamic_trees import inner_width
from sequoia_vllm.drafting.tree_tables import DraftLevels, Level, TreeTables
from sequoia_vllm.kernels.dynamic_trees import (
    best_nodes_kernel,
    choose_nodes_kernel,
    write_trees_kernel,
)
from sequoia_vllm.kernels.node_masks import WORD_BITS, NodeMask
from sequoia_vllm.kernels.told_branches import lay_branches
from sequoia_vllm.tree import TokenTree

# What fits in the registers of a program: pairs of candidates, and a row of nodes.
_COMPARED, TABLE_WARPS = 8192, 8


class SlotTables(TreeTables):
    """Tables of every request slot's own tree: those of `TreeTables` as ``[S + 1, ...]``.

    Trees are padded to W nodes, a multiple of 32. Slot S has a chain of W.
    """

    mask: NodeMask

    def __init__(self, tree: TokenTree, device: torch.device, slots: int) -> None:
        super().__init__(tree, device)
        missing = -tree.size % WORD_BITS
        self.static_parents = F.pad(self.parents, (0, missing), value=-1)[None]
        self.branch = max(CHILDREN, self.children.shape[1])
        width = tree.size + missing
        chain = torch.arange(width, dtype=torch.int32, device=device) - 1

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(slots + 1, width, *shape, dtype=dtype, device=device)

        self.inner_rows = F.pad(self.inner_rows, (0, missing), value=-1).repeat(slots + 1, 1)
        self.parents, self.children = table(), table(self.branch)
        self.shifts = table(dtype=torch.int64)
        self.ancestors = table(width, dtype=torch.bool)
        self.mask = NodeMask(table(width // WORD_BITS), table())
        every = torch.arange(slots + 1, device=device)
        self.write(every[:-1], self.static_parents)
        self.write(every[-1:], chain[None], width)

    def write(self, slots: Tensor, parents: Tensor, depth: int | None = None) -> None:
        """Gives request slots trees; waits for nothing on the device.

        Args:
            slots: int64 ``[R]``; -1 for padding, which has none.
            parents: int32 ``[R, W]``, contiguous in its rows: of each node, -1 for the root and
                padding; or ``[1, W]`` for all of them.
            depth: No tree is deeper; None: as the engine's.
        """
        width = self.parents.shape[1]
        write_trees_kernel[(len(slots),)](
            slots, parents, parents.stride(0) if len(parents) > 1 else 0,
            self.tree.depth if depth is None else depth, self.parents, self.shifts, self.children,
            self.branch, self.ancestors, self.mask.words, self.mask.depths, WIDTH=width,
            NODES=triton.next_power_of_2(width), num_warps=TABLE_WARPS,
        )  # fmt: skip


class DynamicLevels(DraftLevels):
    """The levels of dynamic trees with as many nodes as a prefix of the engine's tree.

    Tokens of nodes are read from candidates, and `draw` chooses which of these are nodes.

    Args:
        static: The levels of that prefix.
        trees: Memory that those of all prefixes share.
    """

    mask: NodeMask

    def __init__(self, static: DraftLevels, trees: "DynamicTrees") -> None:
        self.tree, self.rows_per_tree = static.tree, static.rows_per_tree
        self._trees, device = trees, trees.parents.device
        slots, depth = len(trees.parents), self.tree.depth
        width = inner_width(self.tree.size, depth, CHILDREN)
        widths = [1] + [width] * (depth - 1)
        self.levels, first = [], 0
        for level, nodes in enumerate(widths):
            begin = 1 + first * CHILDREN
            columns = torch.arange(begin, begin + nodes * CHILDREN, dtype=torch.int32)
            none = torch.zeros(slots, nodes, dtype=torch.int32, device=device)
            columns = columns.view(nodes, CHILDREN).to(device).repeat(slots, 1, 1)
            chosen, counts = torch.zeros_like(none), torch.full_like(none, CHILDREN)
            self.levels.append(Level(level, first, chosen, none.long(), counts, columns, none))
            first += nodes
        self._inner = first
        depths = torch.arange(depth).repeat_interleave(torch.tensor(widths)).to(device)
        words = torch.zeros(slots, first, -(-first // WORD_BITS), dtype=torch.int32, device=device)
        words[:, 0, 0] = 1  # the root sees itself
        self.mask = NodeMask(words, depths.int().repeat(slots, 1))
        self.ancestors = torch.empty(0, 0)  # `mask` is all there is

    @property
    def tokens(self) -> Tensor:
        """int64 ``[R, columns]``: tokens of candidates, of which `Level.nodes` are some."""
        return self._trees.candidates.tokens

    def draw(
        self, drafted: DraftedTrees, batch: DraftBatch, num_reqs: int, level: Level, logits: Tensor
    ) -> None:
        """Draws a level's candidates and chooses the next level's nodes, or in the end the trees.

        Arguments as of `DraftedTrees.draw`; ``drafted`` gets the trees' tokens. No request is
        sampled.
        """
        trees, below = self._trees, self.levels[level.depth + 1 :]
        candidates, (nodes, places) = trees.candidates.tokens, (level.nodes, level.parents)
        if below:
            nodes, places = below[0].nodes, below[0].parents
        partials = trees.candidates.draw(batch, num_reqs, self, level, logits, with_statistics=True)
        num_blocks, words = partials.shape[1], self.mask.words
        choose_nodes_kernel[(num_reqs,)](
            logits, logits.stride(0), partials, num_blocks, logits.shape[1], batch.slots,
            batch.told, batch.told.shape[1], candidates, trees.values, trees.above,
            candidates.shape[1], level.nodes, level.depth, level.width,
            1 + level.first * CHILDREN, level.first, nodes, places,
            below[0].width if below else 0, words, self._inner, words.shape[2],
            CHILDREN=CHILDREN, BLOCKS=triton.next_power_of_2(num_blocks),
            LANES=triton.next_power_of_2(level.width * CHILDREN),
            WORDS=triton.next_power_of_2(words.shape[2]), num_warps=4,
        )  # fmt: skip
        if not below:
            count = self._inner * CHILDREN
            best_nodes_kernel[(num_reqs,)](
                candidates, trees.values, trees.above, trees.node_at, candidates.shape[1], count,
                self.tree.size, drafted.tokens, drafted.tokens.stride(0), trees.parents,
                trees.parents.shape[1], **best_constants(count),
            )  # fmt: skip


def best_constants(candidates: int) -> dict[str, int]:
    """How one program chooses among so many candidates: for compilation."""
    lanes = triton.next_power_of_2(candidates + 1)
    return {"LANES": lanes, "AT_ONCE": max(1, min(16, _COMPARED // lanes)), "num_warps": 8}


class DynamicTrees:
    """The dynamic trees of a batch, and memory for what they are chosen from.

    Args:
        tables: Where `SlotTables.write` is to put them.
        drafted: The batch's trees; its memory is shared.
    """

    def __init__(self, tables: SlotTables, drafted: DraftedTrees) -> None:
        self._tables, self._drafted, slots = tables, drafted, len(drafted.tokens)
        # int32 ``[R, W]``: parents of each tree's nodes; -1: the root.
        self.parents = tables.static_parents.repeat(slots, 1)
        columns = 1 + tables.tree.size * CHILDREN  # the draft reads no more nodes than a tree has

        def row(dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, columns, dtype=dtype, device=self.parents.device)

        self.candidates = replace(drafted, tokens=row(torch.int64))
        self.values = row(torch.float32)  # logarithms of path probabilities
        self.above = row(torch.int32)  # column of each candidate's parent
        self.node_at = row(torch.int32)
        self._levels: dict[int, DynamicLevels | None] = {}

    def levels_of(self, drafts: int) -> DynamicLevels | None:
        """Levels of trees with so many drafts; None: there is too little to choose from."""
        if drafts not in self._levels:
            static = self._tables.levels_of(drafts)
            has_choice = inner_width(static.tree.size, static.tree.depth, CHILDREN) > 0
            self._levels[drafts] = DynamicLevels(static, self) if has_choice else None
        return self._levels[drafts]

    def write(self, slots: Tensor, chosen: bool) -> None:
        """Gives request slots ``[R]`` the batch's trees, or the engine's unless they are chosen."""
        parents = self.parents[: len(slots)] if chosen else self._tables.static_parents
        self._tables.write(slots, parents)

    def write_with_branches(
        self, slots: Tensor, chosen: bool, batch: DraftBatch, depth: int
    ) -> None:
        """The same of trees so deep, with branches in the place of some, see `lay_branches`."""
        parents = self.parents[: len(slots)]
        if not chosen:
            parents.copy_(self._tables.static_parents.expand_as(parents))
        lay_branches(batch, self._drafted, parents, depth, len(slots))
        self._tables.write(slots, parents, parents.shape[1])
