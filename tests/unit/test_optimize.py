"""Trees: order, masks, trimming and JSON; and the DP: exact, within its limits, and quick."""

import json
import re
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.tree import (
    Acceptance,
    Frontier,
    TokenTree,
    TreeError,
    optimize,
    optimize_tree,
)
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE
from tests.support.reference_trees import acceptances, brute_force, published, trees

LIMITS = st.one_of(st.none(), st.integers(1, 9))


def expected(tree, acceptance) -> float:
    return tree.expected_tokens(Acceptance.of(acceptance))


@pytest.mark.parametrize(
    ("vector", "max_depth", "size", "value"),
    [
        (case["vector"], case["max_depth"], size, value)
        for case in published()["expected_tokens"]
        for size, value in zip(case["sizes"], case["values"], strict=True)
    ],
)
def test_known_optima(vector, max_depth, size, value):
    tree = optimize_tree(published()[vector], size, max_depth)
    assert tree.size == size
    assert tree.depth <= max_depth
    digits = 4 if vector == "shipped" else 3
    assert round(expected(tree, published()[vector]), digits) == value


@given(
    acceptances(max_branches=6) | acceptances(max_rows=4, max_branches=4), st.integers(1, 9),
    LIMITS, LIMITS,
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_equals_brute_force(acceptance, size, max_depth, max_branch):
    tree = optimize_tree(acceptance, size, max_depth, max_branch)
    best = brute_force(acceptance, size, max_depth, max_branch)
    assert expected(tree, acceptance) == pytest.approx(best, abs=1e-12)
    assert tree.depth <= (max_depth or size)
    assert tree.max_branch <= (max_branch or size)


@pytest.mark.parametrize("vector", ["shipped", "appendix_e", "random", "by depth"])
def test_at_least_as_good_as_each_published_tree(vector):
    acceptance = {
        "random": lambda: 0.95 * np.random.default_rng(0).dirichlet(np.linspace(3, 0.1, 16)),
        "by depth": lambda: np.outer([0.9, 0.7, 0.5], published()["appendix_e"][:16]),
    }.get(vector, lambda: published()[vector])()
    acceptance = Acceptance.of(acceptance)
    trees = {one["name"]: TokenTree(tuple(one["parents"])) for one in published()["growmaps"]}
    assert len(trees) == 100
    for growmap in published()["growmaps"]:
        tree = trees[growmap["name"]]
        assert (tree.size, tree.depth) == (growmap["size"], growmap["depth"])
    largest = max(tree.size for tree in trees.values() if tree.depth <= 20)
    frontier = Frontier.of(acceptance, largest, 20).expected_tokens
    for name, tree in trees.items():
        if tree.depth <= 20:
            ours = frontier[tree.size, tree.depth]
        else:
            ours = expected(optimize_tree(acceptance, tree.size, tree.depth), acceptance)
        assert ours >= expected(tree, acceptance) - 1e-12, name


@given(acceptances(max_rows=3), st.integers(1, 20), st.integers(1, 8), LIMITS)
@settings(max_examples=60, deadline=None)
def test_frontier_agrees_with_single_trees_and_never_falls(
    acceptance, max_size, max_depth, max_branch
):
    frontier = Frontier.of(acceptance, max_size, max_depth, max_branch)
    best = frontier.expected_tokens
    assert best.shape == (max_size + 1, max_depth + 1)
    assert (best[0] == 0).all()
    assert (best[1:, 0] == 1).all()
    assert (np.diff(best, axis=0) >= -1e-12).all()
    assert (np.diff(best[1:], axis=1) >= -1e-12).all()
    for size, depth in ((max_size, max_depth), ((max_size + 1) // 2, (max_depth + 1) // 2)):
        tree = frontier.tree(size, depth)
        assert tree.size <= size
        assert tree.depth <= depth
        assert expected(tree, acceptance) == pytest.approx(best[size, depth], abs=1e-12)
        single = optimize_tree(acceptance, size, depth, max_branch)
        assert expected(single, acceptance) == pytest.approx(best[size, depth], abs=1e-12)


class TestLimits:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"size": 0}, "size must be at least 1, not 0 (sizes count the root)"),
            ({"size": -3}, "size must be at least 1, not -3"),
            ({"size": 2.5}, "size must be a whole number"),
            ({"size": True}, "size must be a whole number"),
            ({"size": None}, "size must be a whole number"),
            ({"size": 4, "max_depth": 0}, "max_depth must be at least 1, not 0"),
            ({"size": 4, "max_depth": "3"}, "max_depth must be a whole number"),
            ({"size": 4, "max_branch": 0}, "max_branch must be at least 1, not 0"),
            ({"size": 1 << 27, "max_depth": 64}, "needs more than 4 GiB"),
        ],
    )
    def test_bad_limits(self, arguments, message):
        with pytest.raises(TreeError, match=re.escape(message)):
            optimize_tree([0.5, 0.3], **arguments)

    def test_no_room_gives_the_largest_tree_there_is(self):
        assert optimize_tree([0.5, 0.3], 100, max_depth=2).size == 1 + 2 + 4
        assert optimize_tree([0.5, 0.3], 100, max_depth=3, max_branch=1).size == 4
        assert optimize_tree([0.5], 1).parents == (-1,)
        assert Frontier.of([0.5], 1, 3).expected_tokens.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]
        assert Frontier.of([0.5], 4, 3).tree(4, 0).parents == (-1,)
        # Four nodes are at most three deep.
        chains = Frontier.of([0.5], 4, 6)
        assert chains.expected_tokens[4].tolist() == [1, 1.5, 1.75, *[1.875] * 4]
        assert chains.tree(4, 6).parents == (-1, 0, 1, 2)
        with pytest.raises(TreeError, match="max_size must be at least 1"):
            Frontier.of([0.5], 0, 3)
        with pytest.raises(TreeError, match="max_depth must be at least 1"):
            Frontier.of([0.5], 4, 0)
        with pytest.raises(TreeError, match="max_branch must be at least 1"):
            Frontier.of([0.5], 4, 3, 0)

    def test_tiny_probabilities_do_not_underflow_into_nonsense(self):
        tree = optimize_tree([0.1], 400)
        assert tree.size == 400
        assert expected(tree, [0.1]) == pytest.approx(10 / 9)


def test_progress_is_reported_to_the_end():
    seen = []
    optimize_tree([0.6, 0.2], 100, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 100) for n in (16, 32, 48, 64, 80, 96, 100)]


def test_the_most_memory_is_a_number_of_cells(monkeypatch):
    """One state, two branches, ten nodes; smaller steps of the sums change nothing."""
    expected = optimize_tree([0.5, 0.3], 10)
    monkeypatch.setattr(optimize, "_MAX_CELLS", 20)
    monkeypatch.setattr(optimize, "_CHUNK", 1)
    assert optimize_tree([0.5, 0.3], 10) == expected
    monkeypatch.setattr(optimize, "_MAX_CELLS", 19)
    with pytest.raises(TreeError, match="with 2 branches and 1 depth levels"):
        optimize_tree([0.5, 0.3], 10)


def test_trees_of_a_frontier_are_made_once():
    frontier = Frontier.of([0.5, 0.3], 6, 3)
    assert frontier.tree(5, 2) is frontier.tree(5, 2)
    assert frontier.tree(5, 3) is not frontier.tree(5, 2)
    assert frontier.acceptance == Acceptance.of([0.5, 0.3])


@pytest.mark.slow
@pytest.mark.parametrize("limits", [(128, 10, 32), (1024, 32, 32)])
def test_memory(limits):
    """A GiB at most is allocated at once."""
    tracemalloc.start()
    try:
        optimize_tree(REFERENCE_ACCEPTANCE, *limits)
        assert tracemalloc.get_traced_memory()[1] < 2**30
    finally:
        tracemalloc.stop()


def shape(tree: TokenTree) -> tuple:
    """The ordered tree itself, whatever its stored order."""

    def below(node: int) -> tuple:
        return tuple(below(child) for child in tree.children[node])

    return below(0)


@given(trees())
@settings(max_examples=150, deadline=None)
def test_topology_is_consistent(tree):
    assert tree.size == tree.num_speculative_tokens + 1 == len(tree.parents)
    assert tree.depths[0] == tree.child_ranks[0] == 0
    ancestors = {0: {0}}
    for node in range(1, tree.size):
        parent = tree.parents[node]
        ancestors[node] = ancestors[parent] | {node}
        assert tree.depths[node] == tree.depths[parent] + 1
        assert tree.children[parent][tree.child_ranks[node]] == node
    for node, seen in ancestors.items():
        assert set(np.flatnonzero(tree.ancestor_mask[node])) == seen
    assert (tree.ancestor_mask.sum(axis=1) == tree.depths + 1).all()
    assert sum(map(len, tree.children)) == tree.num_speculative_tokens
    assert tree.max_branch == max(map(len, tree.children))
    assert len(tree.levels) == tree.depth + 1
    assert sorted(np.concatenate(tree.levels)) == list(range(tree.size))
    for depth, nodes in enumerate(tree.levels):
        assert (tree.depths[nodes] == depth).all()


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
def test_trim_and_json_round_trip(tmp_path_factory, tree, size):
    trimmed = tree.trim(size)
    assert trimmed.parents == tree.parents[:size]
    assert trimmed.trim(tree.size) is trimmed  # with all that it has computed
    assert TokenTree.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree
    path = tmp_path_factory.mktemp("trees") / "tree.json"
    tree.save(path)
    assert TokenTree.load(path) == tree


#        0
#      / | \
#     1  2  5
#    / \    |
#   3   4   6
BRANCHING = TokenTree((-1, 0, 0, 1, 1, 0, 5))


def test_orders_and_chains_of_a_tree():
    assert BRANCHING.depth_first == [0, 1, 3, 4, 2, 5, 6]
    assert TokenTree.chain(3).parents == (-1, 0, 1, 2)
    # Engines on other machines compare it.
    assert BRANCHING.checksum == zlib.crc32(struct.pack("<7i", *BRANCHING.parents))
    assert BRANCHING.parents_array.dtype == BRANCHING.depths.dtype == np.int64


def test_the_file_of_a_tree(tmp_path):
    data = {"schema": "sequoia-vllm/token-tree/v1", "size": 3, "depth": 1, "parents": [-1, 0, 0]}
    tree = TokenTree((-1, 0, 0))
    assert tree.to_dict() == data
    tree.save(tmp_path / "tree.json")
    assert (tmp_path / "tree.json").read_text() == json.dumps(data, indent=1) + "\n"


def test_nodes_of_equal_value_are_ordered_by_depth_then_by_index():
    halves = TokenTree((-1, 0, 0, 1, 2)).sorted_by_value(Acceptance.of([0.5, 0.5]))
    assert halves.parents == (-1, 0, 0, 1, 2)
    certain = TokenTree((-1, 0, 1, 0)).sorted_by_value(Acceptance.of([[0.5, 0.5], [1.0, 0.0]]))
    assert certain.parents == (-1, 0, 0, 1)


def test_arrays_cannot_be_changed():
    tree = TokenTree.chain(3)
    for array in (
        tree.parents_array, tree.depths, tree.child_ranks, tree.ancestor_mask, tree.levels[0],
        Acceptance.of([0.5]).table[0], Frontier.of([0.5], 2, 2).expected_tokens,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


class TestAcceptance:
    def test_forms(self):
        assert Acceptance.of([0.5, 0.2]).to_list() == [0.5, 0.2]
        by_depth = Acceptance.of([[0.5, 0.2], [0.4, 0.1]])
        assert by_depth.to_list() == [[0.5, 0.2], [0.4, 0.1]]
        assert by_depth.probability(0, 0) == 0.5
        assert by_depth.probability(1, 1) == by_depth.probability(1, 9) == 0.1
        assert by_depth.probability(2) == 0.0
        assert Acceptance.of(by_depth) is by_depth
        Acceptance.of([0.5, 0.50005])  # rounded published sums pass
        one, same, other = Acceptance.of([0.5]), Acceptance.of([[0.5]]), Acceptance.of([0.4])
        assert one == same
        assert hash(one) == hash(same)
        assert one not in (other, [0.5])
