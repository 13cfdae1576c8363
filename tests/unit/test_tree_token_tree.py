"""TokenTree: order, masks, trimming and JSON, over random trees."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.tree import Acceptance, TokenTree
from tests.support.reference_trees import acceptances, trees


def shape(tree: TokenTree) -> tuple:
    """The ordered tree itself, whatever its stored order."""

    def below(node: int) -> tuple:
        return tuple(below(child) for child in tree.children[node])

    return below(0)


@given(trees())
@settings(max_examples=150, deadline=None)
def test_topology_is_consistent(tree):
    assert tree.size == tree.num_speculative_tokens + 1 == len(tree.parents)
    assert tree.depths[0] == 0
    assert tree.child_ranks[0] == 0
    for node in range(1, tree.size):
        parent = tree.parents[node]
        assert tree.depths[node] == tree.depths[parent] + 1
        assert tree.children[parent][tree.child_ranks[node]] == node
    assert sum(map(len, tree.children)) == tree.num_speculative_tokens
    assert tree.max_branch == max(map(len, tree.children))
    assert len(tree.levels) == tree.depth + 1
    assert sorted(np.concatenate(tree.levels)) == list(range(tree.size))
    for depth, nodes in enumerate(tree.levels):
        assert (tree.depths[nodes] == depth).all()


@given(trees())
@settings(max_examples=100, deadline=None)
def test_ancestor_mask(tree):
    for node in range(tree.size):
        ancestors, walk = {node}, node
        while walk:
            walk = tree.parents[walk]
            ancestors.add(walk)
        assert set(np.flatnonzero(tree.ancestor_mask[node])) == ancestors
    assert (tree.ancestor_mask.sum(axis=1) == tree.depths + 1).all()


@given(trees(), acceptances(max_rows=3))
@settings(max_examples=150, deadline=None)
def test_value_order_keeps_the_tree_and_every_prefix_is_one(tree, acceptance):
    ordered = tree.sorted_by_value(acceptance)
    assert shape(ordered) == shape(tree)
    assert ordered.expected_tokens(acceptance) == pytest.approx(tree.expected_tokens(acceptance))
    assert ordered.sorted_by_value(acceptance) == ordered
    for size in range(1, ordered.size + 1):
        prefix = ordered.trim(size)
        assert prefix.size == size
        # Ranks are kept: no node comes before its previous sibling.
        assert (prefix.child_ranks == ordered.child_ranks[:size]).all()


@given(trees(), acceptances())
@settings(max_examples=100, deadline=None)
def test_value_order_takes_the_best_node_there_is(tree, acceptance):
    ordered = tree.sorted_by_value(acceptance)
    values = ordered.values(acceptance)
    for node in range(1, ordered.size):
        for later in range(node + 1, ordered.size):
            parent = ordered.parents[later]
            rank = ordered.child_ranks[later]
            sibling_before = ordered.children[parent][rank - 1] if rank else parent
            if max(parent, sibling_before) < node:  # it could have stood here
                assert values[later] <= values[node] + 1e-15


@given(trees(), acceptances(max_rows=3))
@settings(max_examples=100, deadline=None)
def test_values_are_products_along_the_path(tree, acceptance):
    values = tree.values(acceptance)
    assert values[0] == 1
    for node in range(1, tree.size):
        product, walk = 1.0, node
        while walk:
            parent = tree.parents[walk]
            product *= acceptance.probability(int(tree.child_ranks[walk]), int(tree.depths[parent]))
            walk = parent
        assert values[node] == pytest.approx(product)
    assert tree.expected_tokens(acceptance) == pytest.approx(values.sum())


@given(trees(), st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_trim(tree, size):
    trimmed = tree.trim(size)
    assert trimmed.parents == tree.parents[:size]
    assert trimmed.trim(tree.size) == trimmed


@given(trees())
@settings(max_examples=60, deadline=None)
def test_json_round_trip(tmp_path_factory, tree):
    assert TokenTree.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree
    path = tmp_path_factory.mktemp("trees") / "tree.json"
    tree.save(path)
    assert TokenTree.load(path) == tree


def test_arrays_cannot_be_changed():
    tree = TokenTree.chain(3)
    for array in (tree.parents_array, tree.depths, tree.child_ranks, tree.ancestor_mask):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_drawn_example():
    #       0
    #     / | \
    #    1  4  5      value order with p = 0.5, 0.3, 0.1: 0.5, 0.3, 0.25, 0.15, 0.1, ...
    #   / \ |
    #  2  3 6
    tree = TokenTree((-1, 0, 1, 1, 0, 0, 4))
    p = Acceptance.of([0.5, 0.3, 0.1])
    assert tree.values(p) == pytest.approx([1, 0.5, 0.25, 0.15, 0.3, 0.1, 0.15])
    assert tree.sorted_by_value(p).parents == (-1, 0, 0, 1, 1, 2, 0)
    assert [list(level) for level in tree.levels] == [[0], [1, 4, 5], [2, 3, 6]]


class TestAcceptance:
    def test_forms(self):
        assert Acceptance.of([0.5, 0.2]).to_list() == [0.5, 0.2]
        by_depth = Acceptance.of([[0.5, 0.2], [0.4, 0.1]])
        assert by_depth.to_list() == [[0.5, 0.2], [0.4, 0.1]]
        assert by_depth.probability(0, 0) == 0.5
        assert by_depth.probability(1, 1) == by_depth.probability(1, 9) == 0.1
        assert by_depth.probability(2) == 0.0
        assert Acceptance.of(by_depth) is by_depth

    def test_equality_and_hash(self):
        one, same, other = Acceptance.of([0.5]), Acceptance.of([[0.5]]), Acceptance.of([0.4])
        assert one == same
        assert hash(one) == hash(same)
        assert one != other
        assert one != [0.5]

    def test_rounded_published_sums_pass(self):
        Acceptance.of([0.5, 0.50005])

    @given(acceptances(max_rows=3))
    @settings(max_examples=50, deadline=None)
    def test_file_round_trip(self, tmp_path_factory, acceptance):
        directory = tmp_path_factory.mktemp("acceptance")
        for name, data in (
            ("bare", acceptance.to_list()),
            ("ours", {"acceptance": acceptance.to_list(), "note": "x"}),
        ):
            path = directory / f"{name}.json"
            path.write_text(json.dumps(data))
            assert Acceptance.load(path) == acceptance
