import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.verification.topology import Topology
from tests.oracles.verification import children_of


@st.composite
def tree_batches(draw):
    """Parents of up to 4 trees, padded with -2 to the largest."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    width = max(sizes) + draw(st.integers(0, 2))
    trees = []
    for size in sizes:
        parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
        trees.append(parents + [-2] * (width - size))
    return trees


def depth(parents, node):
    return 0 if node == 0 else 1 + depth(parents, parents[node])


@settings(deadline=None)
@given(tree_batches())
def test_look_ups_match_a_plain_reading_of_parents(trees):
    topology = Topology.from_parents(torch.tensor(trees))

    branches = [0] * 20
    for request, parents in enumerate(trees):
        for node, children in enumerate(children_of(parents)):
            row = topology.children[request, node].tolist()
            assert row == children + [-1] * (len(row) - len(children))
            if parents[node] != -2:
                level = depth(parents, node)
                branches[level] = max(branches[level], len(children))
    assert topology.branches == tuple(branches[: branches.index(0) + 1])
    assert topology.max_depth == len(topology.branches) - 1


def test_siblings_need_not_be_neighbours():
    #   0
    #   ├── 1 ── 2
    #   ├── 3
    #   └── 5      (1 has a second child, 4)
    topology = Topology.from_parents(torch.tensor([[-1, 0, 1, 0, 1, 0]], dtype=torch.int32))
    assert topology.children[0].tolist() == [
        [1, 3, 5], [2, 4, -1], [-1] * 3, [-1] * 3, [-1] * 3, [-1] * 3,
    ]  # fmt: skip
    assert topology.branches == (3, 2, 0)


def test_single_nodes_and_an_empty_batch():
    assert Topology.from_parents(torch.tensor([[-1], [-1]])).branches == (0,)
    empty = Topology.from_parents(torch.empty(0, 5, dtype=torch.int64))
    assert empty.branches == (0,)


@pytest.mark.parametrize(
    ("parents", "node"),
    [
        ([0, 0], 0),  # the root has a parent
        ([-2, -2], 0),  # no root
        ([-1, -1], 1),  # a second root
        ([-1, 1], 1),  # its own parent
        ([-1, 2, 0], 1),  # a parent after its child
        ([-1, 0, -3], 2),
        ([-1, -2, 0], 2),  # padding before a node
    ],
)
def test_what_is_no_tree_is_refused_by_request_and_node(parents, node):
    good = [-1] + [0] * (len(parents) - 1)
    with pytest.raises(ValueError, match=f"request 1: node {node} has parent {parents[node]}"):
        Topology.from_parents(torch.tensor([good, parents]))


def test_parents_of_the_wrong_shape_are_refused():
    with pytest.raises(ValueError, match="parents must be"):
        Topology.from_parents(torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match="parents must be"):
        Topology.from_parents(torch.empty(2, 0, dtype=torch.int64))
