"""The oracles of `tests.oracles`: against SciPy, published vectors, and plain loops."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from tests.oracles.attention import random_ancestors, tree_attention_reference
from tests.oracles.laws import ChiSquare, assert_same_law, chi_square, plackett_luce
from tests.oracles.random_numbers import philox
from tests.oracles.verification import Uniforms, algorithm_2, children_of

# -- chi-square ----------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [1, 4, 35, 1295])
@pytest.mark.parametrize("share", [0.1, 0.9, 1.0, 1.3, 3.0])
def test_p_values_are_scipys(freedom, share):
    found = ChiSquare(share * freedom, freedom).p_value
    assert found == pytest.approx(stats.chi2.sf(share * freedom, freedom), rel=1e-8, abs=1e-300)


def test_what_is_impossible_must_not_come_up():
    assert chi_square([99, 1, 0], [100, 0, 0]).p_value == 0.0
    assert chi_square([99, 1], [100, 0]).deviations == float("inf")
    assert chi_square([60, 40, 0], [50, 50, 0]).freedom == 1
    with pytest.raises(AssertionError, match="probability 0 came up"):
        assert_same_law([999, 1], [1.0, 0.0])


def test_another_law_is_noticed():
    assert_same_law([5050, 4950], [0.5, 0.5])
    with pytest.raises(AssertionError, match=r"chi-square 100\.0 of 2 cells"):
        assert_same_law([5500, 4500], [0.5, 0.5])


# -- drafting and verification -------------------------------------------------------


def test_draws_without_replacement_in_fractions():
    law = plackett_luce([Fraction(3), Fraction(2), Fraction(1), Fraction(0)], 2)
    assert law[0, 1] == Fraction(3, 6) * Fraction(2, 3)
    assert law[2, 0] == Fraction(1, 6) * Fraction(3, 5)
    assert sum(law.values()) == 1
    assert all(3 not in draw for draw in law)


def test_a_walk_by_hand():
    """P(a) = 1/4 and Q(a) = 1/2: accepted below 1/2. Else R is (0, 1/3, 2/3), and D (0, 1, 0)."""
    target = {0: [0.25, 0.25, 0.5], 1: [0.0, 0.0, 1.0], 2: [1.0, 0.0, 0.0]}
    draft = [0.5, 0.5, 0.0]
    tokens, children = [0, 0, 1], children_of([-1, 0, 0])
    assert children == [[1, 2], [], []]

    def walk(*values):
        return algorithm_2(target.get, lambda node: draft, tokens, children, Uniforms(values))

    assert walk(0.9, 0.49, 0.0) == ([1], [0, 2])
    assert walk(0.9, 0.51, 0.0) == ([], [2])  # R is (0, 0, 1): the second child is impossible


# -- random numbers ------------------------------------------------------------------


def test_philox_is_philox():
    """Known answers of the published test vectors (Random123, philox4x32, 10 rounds)."""
    ones = 2**32 - 1
    assert philox(0, [0], 0, 0, 0).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    assert philox(-1, [ones], ones, ones, ones).tolist() == [
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    ]


# -- attention and commit ------------------------------------------------------------


def paged(tokens, table, block_size, blocks):
    """A cache ``[blocks, block_size, H, D]`` with ``tokens[r]`` of request r; NaN elsewhere."""
    cache = torch.full((blocks, block_size, *tokens[0].shape[1:]), float("nan"))
    for row, own in zip(table.tolist(), tokens, strict=True):
        for position, token in enumerate(own):
            cache[row[position // block_size], position % block_size] = token
    return cache


@pytest.mark.parametrize("first_node", [0, 2])
def test_tree_attention_is_that_of_loops(first_node):
    """Row by row and head by head over the keys that a node sees, which are put in a list."""
    generator = torch.Generator().manual_seed(0)
    contexts, starts, heads, scale = [5, 9, 0], [0, 3, 3, 7], (4, 2), 0.4
    nodes = first_node + 4
    ancestors = random_ancestors(nodes, generator)
    lengths = [context + nodes for context in contexts]
    keys, values = (
        [torch.randn(length, heads[1], 8, generator=generator) for length in lengths] for _ in "kv"
    )
    table = torch.randperm(15, generator=generator).view(3, 5).int()
    query = torch.randn(8, heads[0], 8, generator=generator)
    found = tree_attention_reference(
        query, paged(keys, table, 4, 15), paged(values, table, 4, 15), table, contexts, starts,
        ancestors, first_node, scale, key_scale=2.0, value_scale=0.5,
    )  # fmt: skip
    assert found[7].isnan().all()  # no request's
    for request, row in ((0, 0), (0, 2), (2, 3), (2, 6)):
        node, context = first_node + row - starts[request], contexts[request]
        seen = [*range(context), *(context + j for j in range(node + 1) if ancestors[node, j])]
        for head in range(heads[0]):
            key_head = head // 2
            weights = [
                float(2.0 * scale * (keys[request][k, key_head] @ query[row, head])) for k in seen
            ]
            shares = np.exp(weights) / np.exp(weights).sum()
            expected = sum(
                0.5 * share * values[request][k, key_head]
                for share, k in zip(shares, seen, strict=True)
            )
            torch.testing.assert_close(found[row, head], expected.float(), atol=1e-5, rtol=1e-5)
