"""Verification is lossless: what is emitted has the target's autoregressive law.

Drafts come from Q(path) and are verified against P(path), both different at every path: in exact
fractions over every outcome, without tolerance. `test_verifier.py` has every outcome of the fast
verifiers with the same probability, and `test_sampling.py` the law of what they verify.
Traversal is never worse than Algorithm 2.
"""

from functools import partial

import numpy as np
import pytest

from tests.oracles import verification
from tests.oracles.laws import autoregressive_law, emitted_law, exact_law, expected_tokens, outcomes
from tests.support.exact_models import KINDS, TREES, depth_of, models

METHODS = verification.algorithm_2, verification.traversal
# With four tokens, one node fewer keeps the outcomes few.
UNBALANCED = [-1, 0, 0, 1, 3]


def laws(verifier, parents, kind, vocabulary=3):
    """The law of what is emitted, and the target's."""
    target, draft = models(kind, vocabulary)
    length = depth_of(parents) + 1
    found = exact_law(target, draft, parents, vocabulary, length, verifier)
    return found, autoregressive_law(target, vocabulary, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("verifier", METHODS)
def test_verification_is_lossless_exactly(verifier, tree, kind):
    found, expected = laws(verifier, TREES[tree], kind)
    assert found == expected


@pytest.mark.parametrize("kind", ["dense", "one-hot Q", "disjoint"])
def test_traversal_is_lossless_with_four_tokens(kind):
    found, expected = laws(verification.traversal, UNBALANCED, kind, vocabulary=4)
    assert found == expected


@pytest.mark.parametrize("tree", ["chain", "binary"])
def test_a_wrong_update_is_not_lossless(tree, monkeypatch):
    monkeypatch.setattr(verification, "chance_after_rejection", divided_by_what_the_draft_has_left)
    found, expected = laws(verification.traversal, TREES[tree], "dense")
    assert sum(abs(found[tokens] - expected[tokens]) for tokens in expected) > 0.005


def divided_by_what_the_draft_has_left(mass, chance_of_path, remaining, token):
    """Found in a public implementation."""
    left = 1 - remaining[token]
    return min(mass / left, 1) if left else 0 * mass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES)
def test_traversal_accepts_no_fewer_tokens(tree, kind):
    """And more of a chain: two likely tokens make up for an unlikely one before them."""
    parents = TREES[tree]
    target, draft = models(kind, vocabulary=3)
    each, all_at_once = (
        expected_tokens(emitted_law(target, draft, parents, verifier)) for verifier in METHODS
    )
    assert all_at_once >= each
    if depth_of(parents) < 2:
        assert all_at_once == each
    if (tree, kind) == ("chain", "dense"):
        assert all_at_once > 1.01 * each


@pytest.mark.parametrize("tree", TREES)
def test_a_target_that_is_certain_is_matched(tree):
    parents = TREES[tree]
    target, draft = models("one-hot P", vocabulary=3)
    children = verification.children_of(parents)

    def both(chance):
        tokens = verification.draft_tree(draft, parents, chance)
        at = partial(verification.path_tokens, tokens, parents)
        found = verification.traversal(
            lambda node: target(at(node)), lambda node: draft(at(node)), tokens, children, chance
        )
        certain = verification.match(lambda n, _: int(np.argmax(target(at(n)))), tokens, children)
        return found == certain

    assert set(outcomes(both)) == {True}
