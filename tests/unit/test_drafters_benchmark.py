"""``python -m benchmarks.drafters``: its standard errors."""

import numpy as np
import pytest

from benchmarks.drafters.engine import ratio


def test_errors_are_of_tokens_per_step_over_groups():
    """As a simulation finds them: groups of 4 to 40 steps, which accept more or less."""
    random = np.random.default_rng(0)
    steps = random.integers(4, 40, (2000, 30))
    accepted = random.poisson(steps * random.gamma(9, 0.1, steps.shape))
    found = [ratio(np.stack(one, 1)) for one in zip(steps, accepted, strict=True)]
    means, errors = np.array(found).T
    assert means.mean() == pytest.approx(1.9, abs=0.01)
    assert errors.mean() == pytest.approx(means.std(), rel=0.1)
