"""Index tables of a tree."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sequoia_vllm.drafting.tree_tables import TreeShapes, TreeTables, picked
from sequoia_vllm.kernels.tree_shapes import only_shape
from sequoia_vllm.tree import TokenTree
from tests.support.own_trees import OWN_TREES
from tests.support.reference_trees import trees

CPU = torch.device("cpu")


TREES = trees().filter(lambda tree: tree.size > 1)


#        0
#      / | \
#     1  2  5
#    / \    |
#   3   4   6
TREE = TokenTree((-1, 0, 0, 1, 1, 0, 5))


def test_levels_of_a_tree():
    levels = TreeTables(TREE, CPU).levels
    root, second = levels.levels
    assert (root.depth, root.first, root.nodes.tolist()) == (0, 0, [0])
    assert root.columns.tolist() == [[1, 2, 5]]
    assert (second.depth, second.first, second.nodes.tolist()) == (1, 1, [1, 5])
    assert second.counts.tolist() == [2, 1]
    assert second.columns.tolist() == [[3, 4], [6, 0]]
    assert second.rows.tolist() == [1, 2]  # of the nodes with children: 0, 1, 5
    assert levels.depths.tolist() == [0, 1, 1]
    assert levels.ancestors.tolist() == [
        [True, False, False],
        [True, True, False],
        [True, False, True],
    ]


def test_a_prefix_keeps_the_rows_of_the_whole_tree():
    #   0 - 1 - 4
    #    \
    #     2 - 3 - 5
    tables = TreeTables(TokenTree((-1, 0, 0, 2, 1, 3)), CPU)
    assert tables.inner_rows.tolist() == [0, 1, 2, 3, -1, -1]
    prefix = tables.levels_of(3)  # 1 and 3 have lost their children
    assert [level.nodes.tolist() for level in prefix.levels] == [[0], [2]]
    assert [level.rows.tolist() for level in prefix.levels] == [[0], [2]]
    assert prefix.num_inner == 2
    assert prefix.rows_per_tree == 3  # the next request's begin after it


@given(TREES, st.data())
def test_no_two_nodes_of_a_batch_share_a_row(tree, data):
    tables = TreeTables(tree, CPU)
    levels = tables.levels_of(data.draw(st.integers(1, tree.size - 1), "drafts"))
    rows = [row for level in levels.levels for row in level.rows.tolist()]
    of_batch = [request * levels.rows_per_tree + row for request in range(3) for row in rows]
    assert len(set(of_batch)) == len(of_batch) == 3 * levels.num_inner
    assert levels.rows_per_tree <= tables.levels.rows_per_tree == tables.levels.num_inner


def test_tables_for_scoring_and_verifying():
    tables = TreeTables(TREE, CPU)
    assert tables.children.tolist() == [
        [1, 2, 5], [3, 4, -1], [-1] * 3, [-1] * 3, [-1] * 3, [6, -1, -1], [-1] * 3,
    ]  # fmt: skip
    assert tables.inner_rows.tolist() == [0, 1, -1, -1, -1, 2, -1]
    assert np.array_equal(tables.ancestors.numpy(), TREE.ancestor_mask)


@given(TREES)
def test_every_node_is_drawn_once_after_its_parent(tree):
    levels = TreeTables(tree, CPU).levels
    drawn, place = {0}, 0
    for level in levels.levels:
        assert level.first == place
        place += level.width
        for row, node in enumerate(level.nodes.tolist()):
            assert node in drawn
            assert tree.depths[node] == level.depth
            children = level.columns[row, : level.counts[row]].tolist()
            assert children == list(tree.children[node])
            drawn |= set(children)
    assert drawn == set(range(tree.size))
    assert levels.num_inner == place


@given(TREES)
def test_inner_nodes_see_their_ancestors(tree):
    levels = TreeTables(tree, CPU).levels
    order = [node for level in levels.levels for node in level.nodes.tolist()]
    assert np.array_equal(levels.ancestors.numpy(), tree.ancestor_mask[np.ix_(order, order)])
    assert levels.depths.tolist() == tree.depths[order].tolist()


# -- shapes of request slots ---------------------------------------------------------

ENGINES, OTHER = OWN_TREES[:2]
NAMES = ("parents", "shifts", "children", "inner_rows", "ancestors")
TENSORS = ("nodes", "parents", "counts", "columns", "rows")


def assert_has(shapes: TreeShapes, slot: int, tree: TokenTree) -> None:
    tables, drafts = TreeTables(tree, CPU), tree.num_speculative_tokens
    for name in NAMES:
        assert torch.equal(getattr(shapes, name)[slot], getattr(tables, name)), name
    levels, own = shapes.levels_of(drafts), tables.levels_of(drafts)
    assert torch.equal(levels.ancestors[slot], own.ancestors)
    for level, other in zip(levels.levels, own.levels, strict=True):
        assert (level.first, level.depth, level.width) == (other.first, other.depth, other.width)
        for name in TENSORS:
            assert torch.equal(getattr(level, name)[slot], getattr(other, name)), name


def test_a_slot_has_its_own_tree():
    shapes, tables = TreeShapes(ENGINES, CPU, 3), TreeTables(ENGINES, CPU)
    levels, tensors = shapes.levels_of(3), [getattr(shapes, name) for name in NAMES]
    assert only_shape(tables.parents, 1, "masks") is tables.parents
    addresses = [one.data_ptr() for one in [levels.ancestors, *tensors]]
    with pytest.raises(ValueError, match="masks needs one tree for all requests"):
        only_shape(TreeShapes(ENGINES, CPU, 1).parents, 1, "masks")
    shapes.set(1, OTHER)
    for slot, tree in enumerate((ENGINES, OTHER, ENGINES)):
        assert_has(shapes, slot, tree)
    shapes.set(1, ENGINES)
    assert_has(shapes, 1, ENGINES)
    again = [getattr(shapes, name) for name in NAMES]
    assert addresses == [one.data_ptr() for one in [shapes.levels_of(3).ancestors, *again]]
    with pytest.raises(ValueError, match="levels of 5 drafts have to be made before trees are set"):
        shapes.levels_of(5)


@pytest.mark.parametrize(
    ("parents", "drafts"),
    [
        ((-1, 0, 0, 1, 1, 2), 6),  # one node less
        ((-1, 0, 0, 1, 1, 1, 3), 6),  # one inner node at depth 1
        ((-1, 0, 1, 2, 3, 1, 2), 6),  # one more level
        ((-1, 0, 0, 0, 1, 2, 5), 6),  # three children of the root
        (OTHER.parents, 4),  # of this prefix one has two inner nodes at depth 1
    ],
)
def test_trees_of_other_sizes_are_refused(parents, drafts):
    shapes = TreeShapes(ENGINES, CPU, 2)
    shapes.levels_of(drafts)
    with pytest.raises(ValueError, match="other nodes, or in some prefix"):
        shapes.set(0, TokenTree(parents))
    assert_has(shapes, 0, ENGINES)


def test_places_are_picked_for_each_request():
    values = torch.arange(24).view(2, 4, 3)
    places = torch.tensor([[3, 0], [1, 1], [2, 3]], dtype=torch.int32)
    slots = torch.tensor([2, -1])
    assert torch.equal(
        picked(values, places, slots), torch.stack([values[0, [2, 3]], values[1, [3, 0]]])
    )
    assert torch.equal(picked(values, places[0], slots), values[:, [3, 0]])
    assert torch.equal(picked(values[..., 0], places[0], slots), values[:, [3, 0], 0])
