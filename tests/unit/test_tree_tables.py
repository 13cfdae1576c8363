"""Index tables of a tree."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.tree import TokenTree
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
