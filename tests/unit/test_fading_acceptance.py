"""Faded counts of acceptance, compared with single counts that are each worth a little."""

import numpy as np
import pytest

from sequoia_vllm.adaptation.state import (
    AdaptationState,
    FadedCounts,
    FadingAcceptance,
    StateError,
)
from sequoia_vllm.metrics.counts import TreeCounts
from sequoia_vllm.tree import Acceptance, TokenTree
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE

TREE = TokenTree((-1, 0, 0, 0, 1, 1, 4))
PRIOR = Acceptance.of([[0.5, 0.2, 0.1, 0.15], [0.4, 0.3, 0.1, 0.05]])
OFFERS, POSITION = 2.0, 8.0  # of the prior at all depths, and of all depths at each


def counts_of(
    trees: int, offered: dict[tuple[int, int], tuple[int, int]], dynamic: list | None = None
) -> TreeCounts:
    """So many trees; offers and acceptances by depth and child, or by node of dynamic ones."""
    counts = TreeCounts(TREE)
    counts.depth_counts[0] = trees
    for place, (offers, taken) in offered.items():
        counts.offered[place], counts.accepted[place] = offers, taken
    if dynamic:
        counts.scored_nodes[:], counts.accepted_nodes[:] = dynamic
    return counts


def vector(
    offered: np.ndarray, accepted: np.ndarray, prior: Acceptance, offers: float
) -> list[list[float]]:
    """The vector entry by entry; ``offers``: that the prior still counts as."""
    depths, children = np.maximum(offered.shape, prior.table.shape)

    def count(of: np.ndarray, depth: int, child: int) -> float:
        return float(of[depth, child]) if depth < len(of) and child < len(of[0]) else 0.0

    def total(of: np.ndarray, child: int) -> float:
        return sum(count(of, depth, child) for depth in range(depths))

    rows = []
    for depth in range(depths):
        known, assumed = {}, {}
        for child in range(children):
            usual = prior.probability(child, depth)
            is_known = total(offered, child) > 0
            if is_known:
                usual = total(accepted, child) + offers * usual
                usual /= total(offered, child) + offers
            taken = count(accepted, depth, child) + POSITION * usual
            into = known if is_known else assumed
            into[child] = taken / (count(offered, depth, child) + POSITION)
        room = max(1 - sum(known.values()), 0.0)
        if sum(assumed.values()) > room:
            more = sum(assumed.values())
            assumed = {child: value * room / more for child, value in assumed.items()}
        row = known | assumed
        whole = max(sum(row.values()), 1.0)
        rows.append([row[child] / whole for child in range(children)])
    return rows


FEW = {(0, 0): (40, 10), (0, 1): (30, 12), (1, 0): (10, 9), (2, 0): (1, 0)}
SURE = {(0, 0): (900, 890), (1, 0): (890, 700), (1, 1): (190, 180)}


@pytest.mark.parametrize("prior", [PRIOR, Acceptance.of([0.6]), None])
@pytest.mark.parametrize("offered", [{}, FEW, SURE])
def test_positions_borrow_from_other_depths_and_these_from_the_prior(offered, prior):
    fading, counts = FadingAcceptance(TREE, prior), counts_of(250, offered)
    kept = fading.add(counts)
    assert kept == pytest.approx(0.5**0.25)
    expected = vector(counts.offered, counts.accepted, prior or REFERENCE_ACCEPTANCE, OFFERS * kept)
    np.testing.assert_allclose(fading.estimate().table, expected)
    saved = np.array(fading.state().vector)
    np.testing.assert_allclose(saved, expected, atol=6e-7)
    assert (saved == saved.round(6)).all()


def test_counts_weigh_half_after_a_thousand_trees():
    fading, first, second = (
        FadingAcceptance(TREE, PRIOR),
        counts_of(401, FEW),
        counts_of(1000, SURE),
    )
    fading.add(first)
    assert fading.add(second) == 0.5
    offered = first.offered / 2 + second.offered
    accepted = first.accepted / 2 + second.accepted
    assumed = OFFERS * 0.5**0.401 * 0.5
    expected = vector(offered, accepted, PRIOR, assumed)
    np.testing.assert_allclose(fading.estimate().table, expected)
    kept = fading.fade(300.12345)
    assert kept == pytest.approx(300.12345 / 1200.5)
    expected = vector(offered * kept, accepted * kept, PRIOR, assumed * kept)
    np.testing.assert_allclose(fading.estimate().table, expected)
    faded = fading.state()
    assert (faded.trees, faded.vector_trees) == (300.123, 1200.5)  # the file has thousandths
    assert faded.offered == (offered * kept).round(3).tolist()
    assert faded.accepted == (accepted * kept).round(3).tolist()
    assert fading.fade(301.0) == 1.0
    assert fading.state() == faded


def test_where_nothing_was_counted_nothing_fades():
    fading = FadingAcceptance(TREE, PRIOR)
    assert fading.fade(1.0) == 1.0
    assert fading.fade(0.5) == 0.5
    fading.add(counts_of(0, FEW))
    assert fading.fade(0.25) == 0.25


def values_of(acceptance: Acceptance) -> list[float]:
    """How likely each node of the tree is accepted."""
    found = [1.0]
    for node in range(1, TREE.size):
        parent = TREE.parents[node]
        child = TREE.children[parent].index(node)
        found.append(found[parent] * acceptance.probability(child, TREE.depths[parent]))
    return found


def test_expected_tokens_follow_the_counts():
    fading = FadingAcceptance(TREE, PRIOR)
    for counts in (counts_of(30, FEW), counts_of(500, SURE)):
        fading.add(counts)
        values = values_of(fading.estimate())
        np.testing.assert_allclose(fading.expected_tokens(), np.cumsum(values))
        np.testing.assert_allclose(fading.expected_tokens(), np.cumsum(values))  # what was kept
    accepted = sum(values) - 1
    assert fading.doubt() == pytest.approx((accepted / (fading.trees + POSITION)) ** 0.5)
    before = fading.expected_tokens()[1]
    fading.fade(1.0)
    assert fading.expected_tokens()[1] < before  # they are the prior's again


SCORED, TAKEN = [60, 59, 58, 50, 20, 0, 0], [60, 45, 9, 10, 5, 0, 0]


@pytest.mark.parametrize("static", [0, 20])
def test_nodes_of_dynamic_trees_are_accepted_as_they_were(static):
    """Rarely scored ones as in the static tree, times what others are more than there."""
    fading = FadingAcceptance(TREE, PRIOR)
    fading.add(counts_of(60 + static, FEW if static else {}, [SCORED, TAKEN]))
    still = values_of(fading.estimate())
    usual = sum(n * value for n, value in zip(SCORED[1:], still[1:], strict=True))
    more = sum(TAKEN[1:]) / usual
    nodes = [
        (taken + POSITION * min(value * (more if node else 1.0), 1.0)) / (scored + POSITION)
        for node, (scored, taken, value) in enumerate(zip(SCORED, TAKEN, still, strict=True))
    ]
    share = 60 / (60 + static)
    expected = [(1 - share) * a + share * b for a, b in zip(still, nodes, strict=True)]
    np.testing.assert_allclose(fading.expected_tokens(), np.cumsum(expected))
    state = fading.state()
    assert (state.trees, state.vector_trees) == (static, static)
    kept = fading.add(counts_of(500, {}, [[500] * 7, [500] + [0] * 6]))
    assert kept == pytest.approx(0.5**0.5)
    assert fading.trees == pytest.approx(kept * (60 + static) + 500)
    assert fading.state().vector_trees == static
    after = fading.expected_tokens()
    assert after[-1] < 1.3
    fading.fade(50.0)
    assert after[-1] < fading.expected_tokens()[-1] < 1.6


def test_a_node_of_a_dynamic_tree_is_accepted_at_most_always():
    fading = FadingAcceptance(TREE, Acceptance.of([0.2, 0.1, 0.1]))
    fading.add(counts_of(100, {}, [[100] * 3 + [0] * 4, [100, 99, 99, 0, 0, 0, 0]]))
    assert (np.diff(fading.expected_tokens()) <= 1).all()


def test_restored_counts_are_worth_a_quarter_of_the_half_life():
    first = FadingAcceptance(TREE, PRIOR)
    first.add(counts_of(900, SURE))
    known = first.state()
    second = FadingAcceptance(TREE, Acceptance.of(known.vector), known.vector_trees)
    second.restore(known)
    assert second.trees == pytest.approx(250.0)
    np.testing.assert_allclose(
        second.state().offered, np.array(known.offered) * 250 / 900, atol=1e-3
    )
    np.testing.assert_allclose(
        second.state().accepted, np.array(known.accepted) * 250 / 900, atol=1e-3
    )
    assert second.state().vector_trees == 900.0
    np.testing.assert_allclose(second.expected_tokens(), first.expected_tokens(), rtol=0.02)
    with pytest.raises(ValueError, match=r"\(3, 1\) belong to another tree"):
        second.restore(FadingAcceptance(TokenTree.chain(3)).state())


def test_the_workload_with_the_most_trees_says_what_acceptance_is_usual():
    def counted(trees: float, first: float) -> FadedCounts:
        return FadedCounts(trees=0, offered=[], accepted=[], vector=[[first]], vector_trees=trees)

    def usual(greedy: float, sampled: float):
        return AdaptationState(
            parents=[-1, 0], schedule=[0, 1], lookup=[0, 1], times=[],
            acceptance={"greedy": counted(greedy, 0.1), "sampled": counted(sampled, 0.2)},
        ).usual_acceptance()  # fmt: skip

    assert usual(499.9, 3.0) is None
    assert usual(500.0, 3.0) == ("greedy", Acceptance.of([0.1]))
    assert usual(499.0, 501.0) == ("sampled", Acceptance.of([0.2]))
    assert issubclass(StateError, ValueError)
