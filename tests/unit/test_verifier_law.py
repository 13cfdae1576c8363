"""Verification is lossless: what is emitted has the target's autoregressive law.

Drafts come from Q(path) and are verified against P(path), both different at every path: in exact
fractions over every outcome, without tolerance. `test_verifier.py` has every outcome of the fast
verifier with the same probability, and `test_sampling.py` the law of what it verifies.
"""

import pytest

from tests.oracles.laws import autoregressive_law, exact_law
from tests.support.exact_models import KINDS, TREES, depth_of, models


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES)
def test_algorithm_2_is_lossless_exactly(tree, kind):
    parents = TREES[tree]
    target, draft = models(kind, vocabulary=3)
    length = depth_of(parents) + 1
    expected = autoregressive_law(target, 3, length)
    assert exact_law(target, draft, parents, 3, length) == expected
