"""Drafting without replacement: its law is Plackett-Luce's, exactly enumerated.

Statistical tests have fixed seeds; with fresh seeds a correct sampler would
fail each of them once in a million runs.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from sequoia_vllm.verification import sampling
from sequoia_vllm.verification.sampling import _exponential
from tests.oracles.laws import assert_draws
from tests.support.tree_problems import drawn_from, generator, rows_at

SAMPLES = 100_000


@pytest.fixture(scope="module", autouse=True, params=["race", "blocks"])
def _ways_to_draw(request):
    """Small vocabularies are drawn from by a race, and here also as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "blocks":
            for name, value in (("FEWEST_TOKENS", 0), ("FEWEST_ENTRIES", 0), ("BLOCK", 2)):
                patch.setattr(sampling, name, value)
        yield


def logits_of(weights: list[float]) -> torch.Tensor:
    return torch.tensor(weights).log()


@pytest.mark.parametrize(
    ("weights", "k"),
    [
        ([5.0, 3.0, 1.0, 0.5], 1),
        ([5.0, 3.0, 1.0, 0.5], 2),
        ([5.0, 3.0, 1.0, 0.5], 4),  # all of the vocabulary
        ([1.0, 1.0, 1.0, 1.0], 3),  # ties
        ([1.0, 1e-3, 1e-3, 1e-6, 0.5], 3),
        ([2.0, 0.0, 1.0, 0.0], 2),  # as many as are possible
        ([2.0, 0.0, 1.0, 0.0], 3),  # one more: uniform over the rest
        ([2.0, 0.0, 1.0, 0.0], 4),
        ([0.0, 1.0, 0.0, 0.0, 0.0], 4),
    ],
)
def test_ordered_draws_follow_plackett_luce(weights, k):
    logits = logits_of(weights).expand(SAMPLES, -1)
    tokens = drawn_from(logits, k, 1.0, generator(0))
    assert tokens.dtype == torch.int64
    assert_draws(tokens, weights)


def test_temperature_divides_the_logits_of_each_row():
    weights = [4.0, 2.0, 1.0]
    temperatures = torch.tensor([1.0, 0.5, 2.0])
    logits = logits_of(weights).expand(3 * SAMPLES, -1)
    tokens = drawn_from(logits, 2, temperatures.repeat(SAMPLES), generator(2))
    for row, temperature in enumerate(temperatures.tolist()):
        assert_draws(tokens[row::3], [w ** (1 / temperature) for w in weights])


def test_tokens_whose_probability_underflows_are_drawn_as_the_verifier_sees_them():
    # Softmax gives 1, 0, 0, 0: to the verifier D is exhausted after the first
    # token, then uniform, although the true weights are e**50 apart.
    logits = torch.tensor([0.0, -200.0, -250.0, -300.0])
    assert rows_at(logits[None], 1.0).tolist() == [[1, 0, 0, 0]]
    tokens = drawn_from(logits.expand(SAMPLES, -1), 4, 1.0, generator(3))
    assert_draws(tokens, [1.0, 0.0, 0.0, 0.0])


def test_the_smallest_normal_probability_still_comes_before_impossible_tokens():
    smallest = math.log(torch.finfo(torch.float32).tiny) + 0.5
    logits = torch.tensor([0.0, -torch.inf, smallest, -90.0])
    draft = rows_at(logits[None], 1.0)[0]
    assert draft[2] > 0
    assert draft[3] == 0  # a subnormal: zero for the sampler and the verifier
    tokens = drawn_from(logits.expand(1000, -1), 3, 1.0, generator(4))
    assert (tokens[:, :2] == torch.tensor([0, 2])).all()
    assert set(tokens[:, 2].tolist()) == {1, 3}


def test_exponential_noise_is_fine_near_zero():
    # A vocabulary's smallest exponentials decide the race; made from float32
    # uniforms they are multiples of 2**-24, so rare tokens get the wrong law.
    noise = _exponential(torch.empty(64, 1 << 16), generator(5))
    assert (noise > 0).all()
    assert kstest((noise.flatten()[::8] * -1).exp().numpy(), "uniform").pvalue > 1e-6
    small = noise[noise < 2**-12]
    assert small.numel() > 500
    assert kstest((small * 2**24 % 1).numpy(), "uniform").pvalue > 1e-6


GRID_LOGITS = st.lists(
    st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), min_size=5, max_size=5).filter(
        lambda row: max(row) > -math.inf
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(GRID_LOGITS, st.integers(0, 5), st.floats(1e-4, 5.0))
def test_draws_are_distinct_and_possible_tokens_come_first(rows, k, temperature):
    logits = torch.tensor(rows)
    tokens = drawn_from(logits, k, temperature)
    assert tokens.shape == (len(rows), k)
    draft = rows_at(logits, temperature)
    for row, drawn in enumerate(tokens.tolist()):
        assert len(set(drawn)) == k
        possible = int((draft[row] > 0).sum())
        assert all(draft[row, t] > 0 for t in drawn[:possible])


@settings(deadline=None)
@given(GRID_LOGITS, st.floats(1e-4, 5.0))
def test_draft_distribution_is_softmax(rows, temperature):
    logits = torch.tensor(rows)
    expected = torch.softmax(logits.double() / temperature, dim=1)
    draft = rows_at(logits, temperature)
    assert draft.dtype == torch.float32
    assert torch.allclose(draft.double(), expected, atol=1e-6)


def test_the_generator_alone_decides():
    logits = torch.zeros(50, 9)
    logits[25:, 2:] = -torch.inf  # fewer tokens than are drawn
    found = []
    for seed in (1, 1, 2):
        torch.rand(1)  # the default one moves on
        found.append(drawn_from(logits, 3, 1.0, generator(seed)).tolist())
    assert found[0] == found[1] != found[2]


def test_half_precision_logits_give_float32_probabilities_and_are_left_alone():
    logits = torch.randn(3, 9, generator=generator(0)).bfloat16()
    before = logits.clone()
    assert torch.equal(rows_at(logits, 0.7), rows_at(logits.float(), 0.7))
    drawn_from(logits, 3)
    assert torch.equal(logits, before)
    assert drawn_from(torch.empty(0, 5), 2).shape == (0, 2)
