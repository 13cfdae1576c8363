"""The oracles of `tests.oracles`: against SciPy, published vectors, and plain loops."""

from fractions import Fraction

import pytest
from scipy import stats

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
