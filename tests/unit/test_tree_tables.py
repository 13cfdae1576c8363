"""Index tables of a tree; and dynamic trees against a plain choice over paths."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.drafting.dynamic_trees import (
    CHILDREN_ON_CPUS,
    CHILDREN_ON_GPUS,
    DynamicGrowth,
    TreeLayouts,
    can_choose,
    inner_width,
)
from sequoia_vllm.drafting.tree_tables import TreeTables, picked
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.retrieval import TOLD_SHARE
from tests.oracles.dynamic_trees import candidates, paths_of, shared, with_told
from tests.support.reference_trees import trees

CPU = torch.device("cpu")


TREES = trees().filter(lambda tree: tree.size > 1)


#        0
#      / | \
#     1  2  5
#    / \    |
#   3   4   6
TREE = TokenTree((-1, 0, 0, 1, 1, 0, 5))


def test_tables_of_a_tree():
    tables = TreeTables(TREE, CPU)
    root, second = tables.levels.levels
    assert (root.depth, root.first, root.nodes.tolist()) == (0, 0, [0])
    assert root.columns.tolist() == [[1, 2, 5]]
    assert (second.depth, second.first, second.nodes.tolist()) == (1, 1, [1, 5])
    assert second.counts.tolist() == [2, 1]
    assert second.columns.tolist() == [[3, 4], [6, 0]]
    assert second.rows.tolist() == [1, 2]  # of the nodes with children: 0, 1, 5
    assert tables.levels.ancestors.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert root.nodes.dtype == second.rows.dtype == torch.int32
    assert (second.parents.tolist(), second.parents.dtype) == ([0, 0], torch.int64)
    third = TreeTables(TokenTree((-1, 0, 0, 1, 2, 3, 4)), CPU).levels.levels[2]
    assert third.parents.tolist() == [0, 1]
    # For scoring and verifying.
    assert tables.shifts.tolist() == [0, 0, -1, -1, -2, -4, -4]
    assert tables.children.tolist() == [
        [1, 2, 5], [3, 4, -1], [-1] * 3, [-1] * 3, [-1] * 3, [6, -1, -1], [-1] * 3,
    ]  # fmt: skip
    assert tables.parents.tolist() == list(TREE.parents)
    assert tables.inner_rows.tolist() == [0, 1, -1, -1, -1, 2, -1]
    for read_by_kernels in (tables.parents, tables.children, tables.inner_rows):
        assert read_by_kernels.dtype == torch.int32
    assert np.array_equal(tables.ancestors.numpy(), TREE.ancestor_mask)


@given(TREES, st.data())
def test_no_two_nodes_of_a_batch_share_a_row(tree, data):
    """A prefix keeps the rows of the whole tree, and has nodes that still have children."""
    tables, drafts = TreeTables(tree, CPU), data.draw(st.integers(1, tree.size - 1), "drafts")
    levels = tables.levels_of(drafts)
    rows = [row for level in levels.levels for row in level.rows.tolist()]
    nodes = [node for level in levels.levels for node in level.nodes.tolist()]
    assert rows == tables.inner_rows[nodes].tolist()
    assert sorted(nodes) == [n for n, below in enumerate(tree.trim(drafts + 1).children) if below]
    of_batch = [request * levels.rows_per_tree + row for request in range(3) for row in rows]
    assert len(set(of_batch)) == len(of_batch) == 3 * len(nodes)
    assert levels.rows_per_tree <= tables.levels.rows_per_tree == len(tables.levels.ancestors)


@given(TREES)
def test_every_node_is_drawn_once_after_its_parent(tree):
    levels = TreeTables(tree, CPU).levels
    drawn, order = {0}, []
    for level in levels.levels:
        assert level.first == len(order)
        assert level.width == len(level.nodes)
        for row, node in enumerate(level.nodes.tolist()):
            assert node in drawn
            assert tree.depths[node] == level.depth
            children = level.columns[row, : level.counts[row]].tolist()
            assert children == list(tree.children[node])
            drawn |= set(children)
            order.append(node)
    assert drawn == set(range(tree.size))
    # And inner nodes see their ancestors.
    assert np.array_equal(levels.ancestors.numpy(), tree.ancestor_mask[np.ix_(order, order)])


def test_places_are_picked_for_each_request():
    values = torch.arange(24).view(2, 4, 3)
    places = torch.tensor([[3, 0], [1, 1], [2, 3]], dtype=torch.int32)
    slots = torch.tensor([2, -1])
    assert torch.equal(
        picked(values, places, slots), torch.stack([values[0, [2, 3]], values[1, [3, 0]]])
    )
    assert torch.equal(picked(values, places[0], slots), values[:, [3, 0]])
    assert torch.equal(picked(values[..., 0], places[0], slots), values[:, [3, 0], 0])


VOCABULARY = 16
ROOT = 3


class Draft:
    """Random log-probabilities, float32 ``[VOCABULARY]``, after each path of tokens."""

    def __init__(self, seed: int, sharpness: float, vocabulary: int = VOCABULARY) -> None:
        self.seed, self.sharpness, self.vocabulary = seed, sharpness, vocabulary

    def __call__(self, path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, path)) % (1 << 31))
        return self.sharpness * torch.randn(self.vocabulary, generator=generator)


NO_LIMIT = 99


def alone(growth: DynamicGrowth) -> tuple[list[int], list[int]]:
    """Tokens and parents of the only tree, whose request's text tells nothing."""
    no_limit = torch.tensor([NO_LIMIT])
    found = growth.best(torch.full((1, growth.depth), -1), no_limit, no_limit)
    size = found.sizes.item()
    return found.tokens[0, :size].tolist(), found.parents[0, :size].tolist()


def grown(drafts: list[Draft], nodes: int, depth: int) -> DynamicGrowth:
    """All levels of a tree for each draft; checks what the draft is asked to read."""
    growth = DynamicGrowth(torch.full((len(drafts),), ROOT), nodes, depth)
    paths = [[()] for _ in drafts]  # of all nodes that the draft has read
    for level in range(depth):
        if level > 0:
            growth.descend()
            for row, read in enumerate(paths):
                for token, seen in zip(growth.tokens[row], growth.seen[row], strict=True):
                    *above, itself = seen.nonzero()[:, 0].tolist()
                    assert itself == len(read)
                    assert [len(read[place]) for place in above] == list(range(level))
                    read.append((*read[above[-1]], int(token)))
        level_paths = [read[-growth.tokens.shape[1] :] for read in paths]
        growth.add_children(
            torch.stack([
                torch.stack([draft(path) for path in own])
                for draft, own in zip(drafts, level_paths, strict=True)
            ])
        )  # fmt: skip
    below = np.arange(1, depth).repeat(growth.width).tolist()
    assert [len(path) for path in paths[0]] == [0, *below]
    assert len(paths[0]) <= nodes
    return growth


def some_told(data, count: int, levels: int) -> list[tuple[int, ...]]:
    """What each request's text says, or that it says nothing."""
    token = st.integers(0, VOCABULARY - 1)
    whole = st.tuples(*[token] * levels)
    return [data.draw(st.one_of(st.just((-1,) * levels), whole)) for _ in range(count)]


@given(
    seeds=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4),
    nodes=st.integers(3, 20), depth=st.integers(1, 5), sharpness=st.floats(0.3, 6.0),
    limits=st.tuples(st.integers(1, 12), st.integers(1, 6)), data=st.data(),
)  # fmt: skip
@settings(deadline=None, max_examples=80)
def test_a_batch_has_its_likeliest_nodes(seeds, nodes, depth, sharpness, limits, data):
    """Also told ones below the draft's last level; the first request has limits, which others use.

    Trees' nodes are in the order of their likelihood, and places say which smaller budgets have
    them.
    """
    if not can_choose(nodes, depth):
        return
    drafts, levels = [Draft(seed, sharpness) for seed in seeds], depth + 2
    told = some_told(data, len(drafts), levels)
    most, deepest = ([limit, *[NO_LIMIT] * (len(drafts) - 1)] for limit in limits)
    growth = grown(drafts, nodes, depth)
    found = growth.best(torch.tensor(told), torch.tensor(most), torch.tensor(deepest))
    every = [candidates(draft, depth, growth.width, CHILDREN_ON_CPUS) for draft in drafts]
    every = [
        with_told(own, text if text[0] >= 0 else (), TOLD_SHARE)
        for own, text in zip(every, told, strict=True)
    ]
    layouts = TreeLayouts.of(found.parents)
    for row, expected in enumerate(shared(every, nodes, most, deepest)):
        size = int(found.sizes[row])
        tokens, parents, places = (
            part[row, :size].tolist() for part in (found.tokens, found.parents, found.places)
        )
        assert tokens[0] == ROOT
        assert dict(zip(paths_of(tokens, parents), places[1:], strict=True)) == expected
        tree = TokenTree(tuple(parents))  # refuses what is no tree, and so any prefix
        assert layouts.depths[row, :size].tolist() == tree.depths.tolist()
        assert layouts.ancestors[row, :size, :size].tolist() == tree.ancestor_mask.tolist()


def trees_of(own: dict, most: int) -> list[set]:
    """All sets of 1 to ``most`` paths that have each path's parent."""
    return [
        set(paths)
        for size in range(1, most + 1)
        for paths in itertools.combinations(own, size)
        if all(len(path) == 1 or path[:-1] in paths for path in paths)
    ]


@given(seeds=st.tuples(*[st.integers(0, 1 << 20)] * 2), sharpness=st.floats(0.3, 4.0))
@settings(deadline=None, max_examples=20)
def test_no_other_trees_of_the_batch_are_expected_to_accept_more(seeds, sharpness):
    """Of all choices of as many nodes in which each node has its parent, by the draft."""
    nodes = 3
    drafts = [Draft(seed, sharpness, vocabulary=3) for seed in seeds]
    growth = grown(drafts, nodes, depth=2)
    no_limit = torch.full((2,), NO_LIMIT)
    found = growth.best(torch.full((2, 2), -1), no_limit, no_limit)
    every = [candidates(draft, 2, growth.width, CHILDREN_ON_CPUS) for draft in drafts]
    shares = [{path: math.exp(value) for path, value in own.items()} for own in every]
    best = max(
        sum(shares[0][path] for path in one) + sum(shares[1][path] for path in other)
        for one, other in itertools.product(*(trees_of(own, 3) for own in shares))
        if len(one) + len(other) == 2 * (nodes - 1)
    )
    chosen = 0.0
    for row, size in enumerate(found.sizes.tolist()):
        own = found.tokens[row, :size].tolist(), found.parents[row, :size].tolist()
        chosen += sum(shares[row][path] for path in paths_of(*own))
    assert chosen == pytest.approx(best, rel=1e-5)


def test_no_request_gets_a_node_without_its_parent():
    """Where texts tell tokens below the draft's levels, and another request is less certain."""
    drafts = [Draft(1, 1.0), Draft(2, 4.0)]
    growth, no_limit = grown(drafts, nodes=6, depth=2), torch.full((2,), NO_LIMIT)
    likeliest = int(drafts[0](()).argmax())
    told = [likeliest, int(drafts[0]((likeliest,)).argmin()), 7, 6, 5]
    found = growth.best(torch.tensor([told, [-1] * 5]), no_limit, no_limit)
    assert found.sizes.sum() == 2 * 6
    for row, size in enumerate(found.sizes.tolist()):
        places, parents = found.places[row].tolist(), found.parents[row].tolist()
        for node in range(1, size):
            assert 0 <= parents[node] < node
            assert places[parents[node]] <= places[node] > 0


def test_told_tokens_that_the_target_cannot_have_are_no_nodes():
    growth = DynamicGrowth(torch.tensor([ROOT]), nodes=4, depth=1)
    growth.add_children(torch.zeros(1, 1, VOCABULARY))
    limits = torch.tensor([NO_LIMIT]), torch.tensor([NO_LIMIT])
    found = growth.best(torch.tensor([[5, VOCABULARY, 6]]), *limits)
    assert found.parents[0, : found.sizes[0]].tolist() == [-1, 0, 0, 0]


def test_children_to_choose_among():
    """Kernels need a power of 2. With more children wider trees are dynamic."""
    assert CHILDREN_ON_GPUS & (CHILDREN_ON_GPUS - 1) == 0
    for children, widest in ((CHILDREN_ON_CPUS, 157), (CHILDREN_ON_GPUS, 73)):
        assert inner_width(widest, 2, children) > 0 == inner_width(widest + 1, 2, children)


@pytest.mark.parametrize("broken", [math.nan, -math.inf, math.inf])
def test_a_broken_draft_gives_trees_all_the_same(broken):
    """Also where one node alone is broken, or some tokens are excluded."""
    growth = DynamicGrowth(torch.tensor([ROOT]), nodes=9, depth=3)
    growth.add_children(torch.randn(1, 1, VOCABULARY))
    growth.descend()
    scores = torch.randn(1, growth.width, VOCABULARY)
    scores[0, 1, ::2] = broken
    growth.add_children(scores)
    growth.descend()
    growth.add_children(torch.full((1, growth.width, VOCABULARY), broken))
    tokens, parents = alone(growth)
    TokenTree(tuple(parents))
    assert len(set(paths_of(tokens, parents))) == 8


def test_equally_likely_nodes_come_level_by_level():
    """A child that is certain is as likely as its parent, and must not come first."""
    growth = DynamicGrowth(torch.tensor([ROOT]), nodes=6, depth=3)
    certain = torch.full((1, 1, VOCABULARY), -torch.inf)
    certain[..., 7] = 0.0
    for level in range(3):
        if level:
            growth.descend()
        growth.add_children(certain.expand(1, growth.tokens.shape[1], -1))
    tokens, parents = alone(growth)
    assert tokens[:4] == [ROOT, 7, 7, 7]
    assert parents[:4] == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    ("nodes", "depth", "width"),
    [(2, 1, 0), (32, 1, 0), (4, 3, 1), (6, 4, 1), (16, 6, 3), (32, 8, 4), (1024, 2, 0)],
)
def test_width_of_levels(nodes, depth, width):
    """None where all nodes are the root's children, or where there is too little to choose from."""
    assert inner_width(nodes, depth, CHILDREN_ON_CPUS) == width
