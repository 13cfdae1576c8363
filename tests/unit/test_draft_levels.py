"""Index arrays of a tree as Model Runner V2 grows it."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sequoia_vllm.drafting.levels import DraftLevels, inner_rows
from sequoia_vllm.tree import TokenTree

CPU = torch.device("cpu")


@st.composite
def trees(draw):
    size = draw(st.integers(2, 24))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    return TokenTree(tuple(parents))


#        0
#      / | \
#     1  2  5
#    / \    |
#   3   4   6
TREE = TokenTree((-1, 0, 0, 1, 1, 0, 5))


def test_levels_of_a_tree():
    levels = DraftLevels(TREE, inner_rows(TREE), CPU)
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
    rows = inner_rows(TREE)
    assert rows == [0, 1, -1, -1, -1, 2, -1]
    prefix = DraftLevels(TREE.trim(6), rows, CPU)  # node 5 has lost its child
    assert [level.nodes.tolist() for level in prefix.levels] == [[0], [1]]
    assert [level.rows.tolist() for level in prefix.levels] == [[0], [1]]


@given(trees())
def test_every_node_is_drawn_once_after_its_parent(tree):
    levels = DraftLevels(tree, inner_rows(tree), CPU)
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


@given(trees())
def test_inner_nodes_see_their_ancestors(tree):
    levels = DraftLevels(tree, inner_rows(tree), CPU)
    order = [node for level in levels.levels for node in level.nodes.tolist()]
    assert np.array_equal(levels.ancestors.numpy(), tree.ancestor_mask[np.ix_(order, order)])
    assert levels.depths.tolist() == tree.depths[order].tolist()
