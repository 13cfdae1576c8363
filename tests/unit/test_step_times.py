"""Times of steps, compared with a filter of whole matrices and with what few steps must say."""

import numpy as np
import pytest

from sequoia_vllm.adaptation.step_times import (
    StepTimes,
    assumed_seconds,
    pass_seconds,
    step_seconds,
)
from sequoia_vllm.tree import TokenTree
from tests.oracles.step_times import WholeFilter

TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3, 3))
SIZES = [0, 1, 3, 7]


def steps_of(rng: np.random.Generator, batches: int, noise: float):
    """Random steps: alike for a while, some disturbed, some of an earlier engine."""
    drafts, batch = 0, 1
    for _ in range(120):
        if rng.random() < 0.3:
            drafts, batch = int(rng.choice(SIZES)), int(rng.integers(1, batches + 1))
        seconds = (1 + 0.3 * (drafts > 0) + 0.05 * drafts * batch) * rng.lognormal(0, noise)
        seconds *= rng.choice([1.0, 0.0, 1.2, 9.0], p=[0.85, 0.02, 0.09, 0.04])
        context = int(rng.choice([0, 0, 300, 9000]))
        yield drafts, batch, seconds, context, float(rng.choice([1.0, 16.0], p=[0.9, 0.1]))


@pytest.mark.parametrize(
    ("batches", "doubt", "noise"),
    [(1, 1.0, 0.04), (5, 0.3, 0.5), (12, 1.0, 0.04), (16, 2.0, 0.003)],
)
def test_steps_correct_all_times_as_a_filter_of_whole_matrices_does(batches, doubt, noise):
    table = assumed_seconds(TREE, batches, SIZES)
    times, oracle = StepTimes(SIZES, table, doubt), WholeFilter(SIZES, table, doubt)
    kinds = [(drafts, batch) for drafts in SIZES for batch in range(1, batches + 1)]
    seen = set()
    for number, step in enumerate(steps_of(np.random.default_rng(batches), batches, noise)):
        times.add(*step)
        oracle.add(*step)
        if step[-1] == 1.0:
            seen.add((step[0], 1 << (step[1].bit_length() - 1)))
        if number % 6:
            continue
        assert times.pace == pytest.approx(oracle.pace, rel=1e-9)
        assert times.seen.tolist() == list(oracle.seen.values())
        for drafts, batch in kinds[number % 5 :: 5]:
            for context in (0, 5000):
                expected = oracle.seconds(drafts, batch, context)
                assert times.seconds(drafts, batch, context) == pytest.approx(expected, rel=1e-7)
            expected = [oracle.doubt_of(other, drafts, batch) for other in SIZES]
            np.testing.assert_allclose(times.doubts(drafts, batch), expected, atol=1e-6)
        found = times.all_seconds(slice(1, None), 700.0)
        for drafts, batch in kinds:
            expected = oracle.seconds(drafts, batch, 700.0 * batch)
            assert found[SIZES.index(drafts), batch - 1] == pytest.approx(expected, rel=1e-7)
    saved = times.to_list()
    assert [kind[:2] for kind in saved] == sorted(seen)
    for drafts, batch, seconds in saved:
        assert seconds == pytest.approx(oracle.seconds(drafts, batch), rel=1e-7)


def test_saved_times_are_those_of_steps_that_an_engine_took():
    """What was restored is not saved again, and what no batch size has is left out."""
    times, untouched = (StepTimes(SIZES, assumed_seconds(TREE, 6, SIZES)) for _ in range(2))
    times.restore([(1, 4, 2.0), (3, 1, 2.0)])
    assert times.to_list() == []
    assert times.seen.tolist() == [0] * 4
    assert times.seconds(3, 1) == pytest.approx(2.0, rel=0.2)
    once = [times.seconds(1, 4), times.seconds(7, 6)]
    times.restore([(1, 0, 9.0), (1, 7, 9.0), (2, 1, 9.0)])
    assert [times.seconds(1, 4), times.seconds(7, 6)] == once
    times.restore([(1, 6, 2.0)])  # the largest batch size
    assert times.seconds(1, 6) == pytest.approx(2.0, rel=0.2)
    assert untouched.seconds(1, 6) < 1.5


def test_a_number_of_drafts_that_has_no_times_has_the_next_larger_ones():
    times = StepTimes(SIZES, assumed_seconds(TREE, 2, SIZES))
    times.add(2, 1, 99.0)  # changes none
    for drafts, taken in ((2, 3), (4, 7), (9, 7), (3, 3)):
        assert times.seconds(drafts, 2) == times.seconds(taken, 2) < 9.0


def test_passes_take_longer_by_the_rows_of_their_levels():
    """Levels of 2, 3 and 2 nodes: a prefix has as many passes of the draft as it is deep."""
    found = step_seconds(TREE, 3, [0, 2, 4, 7], lambda rows: rows, lambda rows: 100.0 + rows)
    for place, (drafts, depth) in enumerate([(0, 0), (2, 1), (4, 2), (7, 3)]):
        for batch in range(4):
            drafting = depth * (100 + batch * drafts / max(depth, 1))
            assert found[place, batch] == pytest.approx(batch * (1 + drafts) + drafting)


def test_a_pass_takes_its_weights_time_until_arithmetic_takes_longer():
    assert pass_seconds(np.array([0.0, 20.0, 2000.0]), 20.0) == pytest.approx(
        [1, 2 ** (1 / 3), 100]
    )
    [[plain, _, many], [_, drafted, _]] = assumed_seconds(TREE, 2, [0, 2], knee=4.0, draft=0.5)
    assert plain == 1.0
    assert many == pytest.approx((1 + 0.5**3) ** (1 / 3))
    assert drafted == pytest.approx((1 + 0.75**3) ** (1 / 3) + 0.5 * (1 + 0.5**3) ** (1 / 3))
