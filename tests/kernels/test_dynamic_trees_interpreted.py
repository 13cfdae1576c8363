"""Dynamic trees of kernels: the likeliest paths, and tables that the target's pass reads."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from sequoia_vllm.drafting.draft_plan import inner_rows
from sequoia_vllm.drafting.dynamic_levels import CHILDREN, DynamicTrees, SlotTables, best_constants
from sequoia_vllm.drafting.dynamic_trees import inner_width
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels import dynamic_trees as kernels
from sequoia_vllm.kernels.modes import GREEDY
from sequoia_vllm.kernels.node_masks import NodeMask
from sequoia_vllm.kernels.told_branches import BRANCH
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.retrieval import preferred
from tests.kernels import test_growth_interpreted as growing
from tests.kernels.test_growth_interpreted import CONTEXTS, CPU, DEPTH, LONGEST, SLOTS, logits_after
from tests.oracles.dynamic_trees import likeliest, paths_of

TREE = TokenTree((-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 3, 5))
# What requests' texts say comes next: nothing, or three tokens; 90 is none of the draft's.
TOLD = [[5, 7, 90], [-1] * 3, [-1] * 3, [10, 2, 3]]


def scores_after(path, told):
    """float32 ``[V]``: what Q is the softmax of, by the texts, too."""
    is_told = told[0] >= 0 and list(path) == told[: len(path)]
    given = torch.tensor([told[len(path)] if is_told else -1])
    return preferred(logits_after(path)[None], given)[0]


def texts():
    """int32 ``[S, L]``: two texts' last tokens, 90 and 91, are their first, too."""
    every = torch.arange(100, 100 + 4 * LONGEST, dtype=torch.int32).view(4, LONGEST)
    for request in (0, 3):
        own, root = every[SLOTS[request]], CONTEXTS[request]
        own[:5] = torch.tensor([90, 91, *TOLD[request]])
        own[root - 1 : root + 1] = torch.tensor([90, 91])
    return every


def grown(drafts, retrieval=False):
    """Tables, trees, and tokens ``[R, N]``."""
    tables, made = SlotTables(TREE, CPU, len(SLOTS)), []

    def levels_of(drafted):
        made.append(DynamicTrees(tables, drafted))
        return made[0].levels_of(drafts)

    drafted, _ = growing.grown(tables, GREEDY, texts() if retrieval else None, levels_of)
    return tables, made[0], drafted.tokens[:, : drafts + 1]


@pytest.mark.parametrize("drafts", [4, 7, 11])
@pytest.mark.parametrize("retrieval", [False, True])
def test_nodes_are_the_likeliest_ones(drafts, retrieval):
    """In this order; requests and padding beside each other change nothing."""
    _, trees, tokens = grown(drafts, retrieval)
    nodes, depth = drafts + 1, TREE.trim(drafts + 1).depth
    width = inner_width(nodes, depth, CHILDREN)
    for request, slot in enumerate(SLOTS):
        if slot >= 0:
            parents = trees.parents[request, :nodes].tolist()
            own = TOLD[request] if retrieval else [-1] * DEPTH
            scores = partial(scores_after, told=own)
            expected = likeliest(scores, nodes, depth, width, CHILDREN)
            assert paths_of(tokens[request].tolist(), parents) == expected


def test_a_choice_that_ignores_what_texts_say_is_caught(monkeypatch):
    monkeypatch.setattr(
        kernels, "_raise_told", lambda raw, _, maximum, total: (raw, maximum, total)
    )
    with pytest.raises(AssertionError):
        test_nodes_are_the_likeliest_ones(11, True)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_draft_gives_trees_all_the_same(broken, monkeypatch):
    def logits(path):
        own = logits_after(path)
        own[(slice(None) if len(path) > 1 else slice(None, None, 2)) if path else 3] = broken
        return own

    monkeypatch.setattr(growing, "logits_after", logits)
    _, trees, tokens = grown(11)
    for request in (0, 1, 3):
        assert TokenTree(tuple(trees.parents[request, :12].tolist())).size == 12  # or it raises
        assert all(0 <= token < growing.VOCABULARY for token in tokens[request, 1:].tolist())


@pytest.mark.parametrize("requests", [2, 4])
def test_each_slot_has_its_tables(requests):
    """Those of the batch their trees', the others the engine's; the last one has a chain."""
    tables, trees, _ = grown(11, retrieval=True)
    assert tables.static_parents.tolist() == [[*TREE.parents, *[-1] * 20]]
    assert (tables.parents[:4] == tables.static_parents).all()
    slots, width = SLOTS[:requests], tables.parents.shape[1]
    trees.write(torch.tensor(slots, dtype=torch.int32), chosen=True)
    own = {slot: trees.parents[request, :12] for request, slot in enumerate(slots) if slot >= 0}
    own = {slot: torch.tensor(TREE.parents) for slot in range(4)} | own
    own[4] = torch.arange(-1, width - 1)
    assert len({tuple(parents.tolist()) for parents in own.values()}) > 3
    for slot, parents in own.items():
        tree, size = TreeTables(TokenTree(tuple(parents.tolist())), CPU), len(parents)
        rows = [*inner_rows(TREE), *[-1] * 20]  # the engine's tree's, whatever the slot's
        assert tables.inner_rows[slot].tolist() == rows
        assert torch.equal(tables.parents[slot, :size], tree.parents)
        assert torch.equal(tables.shifts[slot, :size], tree.shifts)
        assert torch.equal(tables.ancestors[slot, :size, :size], tree.ancestors)
        children = tables.children[slot, :size]
        assert torch.equal(children[:, : tree.children.shape[1]], tree.children)
        assert (children[:, tree.children.shape[1] :] == -1).all()
        mask = NodeMask.of(tree.ancestors)
        assert torch.equal(tables.mask.words[slot, :size], mask.words)
        assert torch.equal(tables.mask.depths[slot, :size], mask.depths)
    trees.write(torch.tensor(slots), chosen=False)
    assert (tables.parents[:4] == tables.static_parents).all()


def trees_of(tree):
    """Such trees of two slots, with room for eight nodes with children."""
    drafted = growing.DraftedTrees.empty(2, 8, 4, tree.size, 11, torch.float16, CPU)
    return DynamicTrees(SlotTables(tree, CPU, 2), drafted), drafted


def test_too_small_trees_stay_static():
    assert trees_of(TREE)[0].levels_of(1) is None
    assert trees_of(TokenTree((-1, 0, 1, 2)))[0].levels_of(3) is not None


INT, LONG, FLOAT, HALF, BOOL = torch.int32, torch.int64, torch.float32, torch.float16, torch.bool


def kinds(owner):
    """Dtype and shape of each of its tensors."""
    tensors = {name: one for name, one in vars(owner).items() if torch.is_tensor(one)}
    return {name: (one.dtype, *one.shape) for name, one in tensors.items()}


def test_memory_is_what_is_needed(bfloat16_by_default):
    trees, drafted = trees_of(TREE)
    assert kinds(drafted) == {
        "nodes": (INT, 2), "rows": (INT, 2), "logits": (HALF, 8, 4, 11), "stats": (FLOAT, 8, 4, 2),
        "tokens": (LONG, 2, 12),
    }  # fmt: skip
    for kept in (drafted.logits, drafted.stats):  # rows of nodes follow one another
        bytes_of_row = kept.element_size() * kept.shape[2]
        assert kept.untyped_storage().nbytes() == (8 + 4 - 1) * bytes_of_row
    assert kinds(trees._tables) == {
        "static_parents": (INT, 1, 32), "inner_rows": (INT, 3, 32), "parents": (INT, 3, 32),
        "children": (INT, 3, 32, CHILDREN), "shifts": (LONG, 3, 32), "ancestors": (BOOL, 3, 32, 32),
    }  # fmt: skip
    assert kinds(trees._tables.mask) == {"words": (INT, 3, 32, 1), "depths": (INT, 3, 32)}
    columns = 1 + TREE.size * CHILDREN
    assert kinds(trees.candidates)["tokens"] == (LONG, 2, columns)
    assert kinds(trees) == {
        "parents": (INT, 2, 32), "values": (FLOAT, 2, columns), "above": (INT, 2, columns),
        "node_at": (INT, 2, columns),
    }  # fmt: skip
    levels = trees.levels_of(11)
    assert kinds(levels.mask) == {"words": (INT, 2, 11, 1), "depths": (INT, 2, 11)}
    for level, nodes in zip(levels.levels, (1, 5, 5), strict=True):
        assert kinds(level) == {
            "nodes": (INT, 2, nodes), "parents": (LONG, 2, nodes), "counts": (INT, 2, nodes),
            "columns": (INT, 2, nodes, CHILDREN), "rows": (INT, 2, nodes),
        }  # fmt: skip


@pytest.mark.parametrize("candidates", [7, 8, 1000, 2040, 8000])
def test_one_program_compares_all_candidates_in_its_registers(candidates):
    chosen = best_constants(candidates)
    lanes, at_once = chosen["LANES"], chosen["AT_ONCE"]
    assert candidates < lanes <= 2 * candidates  # the root's column, too
    assert at_once & (at_once - 1) == 0
    assert at_once == 16 or lanes * at_once == 8192


# Tokens of a branch at most, and nodes of the request's tree; the trees are four deep. Then its
# nodes: the tree stays where it is as deep, or the request may verify too few.
BRANCHES = [(9, 12, 10), (4, 12, None), (11, 12, 12), (30, 6, 6), (30, 5, None), (9, 0, None)]


@pytest.mark.parametrize("chosen", [False, True])
def test_branches_take_the_place_of_trees_that_are_not_as_deep(chosen):
    """In their nodes, topology and place of Q; trees and padding beside them stay."""
    slots = torch.tensor([3, 0, 6, 1, 5, 2, -1])
    nodes = torch.full((7,), -7, dtype=torch.int32)
    for slot, (_, size, _) in zip(slots.tolist(), BRANCHES, strict=False):
        nodes[slot] = size
    tables = SlotTables(TREE, CPU, 7)
    drafted = SimpleNamespace(
        nodes=nodes.clone(), rows=torch.arange(7, dtype=torch.int32),
        tokens=torch.arange(7 * TREE.size).view(7, -1).clone(),
    )  # fmt: skip
    before, rows = drafted.tokens.clone(), drafted.rows.clone()
    trees = object.__new__(DynamicTrees)
    trees._tables, trees._drafted = tables, drafted
    own = tables.static_parents.repeat(7, 1)
    own[:, 4:] = torch.where(own[:, 4:] >= 0, own[:, 4:] - 1, -1)  # of their own
    trees.parents = own.clone()
    batch = SimpleNamespace(
        slots=slots, branches=torch.tensor([most for most, _, _ in BRANCHES] + [9]).int(),
        told=-torch.arange(1, 1 + 7 * 11).view(7, 11),
    )  # fmt: skip
    trees.write_with_branches(slots, chosen, batch, 4)
    for request, (slot, (_, _, size)) in enumerate(zip(slots.tolist(), BRANCHES, strict=False)):
        length = (size or 1) - 1
        told = slice(1, 1 + length)
        assert torch.equal(drafted.tokens[request, told], batch.told[request, :length])
        assert torch.equal(drafted.tokens[request, 1 + length :], before[request, 1 + length :])
        assert int(drafted.nodes[slot]) == (size or nodes[slot])
        assert int(drafted.rows[slot]) == (BRANCH if size else rows[slot])
        tree = own[request] if chosen else tables.static_parents[0]
        chain = torch.arange(-1, own.shape[1] - 1, dtype=torch.int32)
        chain[1 + length :] = -1
        assert torch.equal(tables.parents[slot], chain if size else tree)
        if size:
            assert tables.mask.depths[slot, :size].tolist() == list(range(size))
            seen = torch.ones(size, size, dtype=torch.bool).tril()
            assert torch.equal(tables.ancestors[slot, :size, :size], seen)
    assert int(drafted.rows[4]) == 4  # a slot of no request
    assert int(drafted.nodes[4]) == -7
