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

from sequoia_vllm.verification.sampling import (
    _exponential,
    draft_distribution,
    sample_without_replacement,
)
from tests.oracles.laws import assert_same_law, plackett_luce

SAMPLES = 100_000


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_of(weights: list[float]) -> torch.Tensor:
    return torch.tensor(weights).log()


def assert_plackett_luce(tokens: torch.Tensor, weights: list[float]) -> None:
    """The rows of ``tokens`` are ordered draws without replacement from ``weights``."""
    vocabulary, k = len(weights), tokens.shape[1]
    places = torch.tensor([vocabulary**i for i in range(k)])
    counts = torch.bincount((tokens * places).sum(dim=1), minlength=vocabulary**k)
    probabilities = torch.zeros(vocabulary**k, dtype=torch.float64)
    for draw, probability in plackett_luce(weights, k).items():
        probabilities[sum(t * vocabulary**i for i, t in enumerate(draw))] = float(probability)
    assert_same_law(counts.numpy(), probabilities.numpy())


# -- the law ---------------------------------------------------------------------


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
    tokens = sample_without_replacement(logits, k, 1.0, generator(0))
    assert tokens.dtype == torch.int64
    assert_plackett_luce(tokens, weights)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature, as_tensor):
    weights = [4.0, 2.0, 1.0]
    logits = logits_of(weights).expand(SAMPLES, -1)
    rows = torch.full((SAMPLES,), temperature) if as_tensor else temperature
    tokens = sample_without_replacement(logits, 2, rows, generator(1))
    assert_plackett_luce(tokens, [w ** (1 / temperature) for w in weights])


def test_each_row_has_its_own_temperature():
    weights = [4.0, 2.0, 1.0]
    temperatures = torch.tensor([1.0, 0.0, 0.5, 1e-6]).repeat(SAMPLES)
    tokens = sample_without_replacement(
        logits_of(weights).expand(4 * SAMPLES, -1), 2, temperatures, generator(2)
    )
    assert_plackett_luce(tokens[0::4], weights)
    assert_plackett_luce(tokens[2::4], [w**2 for w in weights])
    greedy = torch.tensor([0, 1])
    assert (tokens[1::4] == greedy).all()
    assert (tokens[3::4] == greedy).all()


def test_tokens_whose_probability_underflows_are_drawn_as_the_verifier_sees_them():
    # Softmax gives 1, 0, 0, 0: to the verifier D is exhausted after the first
    # token, then uniform, although the true weights are e**50 apart.
    logits = torch.tensor([0.0, -200.0, -250.0, -300.0])
    assert draft_distribution(logits[None], 1.0).tolist() == [[1, 0, 0, 0]]
    tokens = sample_without_replacement(logits.expand(SAMPLES, -1), 4, 1.0, generator(3))
    assert_plackett_luce(tokens, [1.0, 0.0, 0.0, 0.0])


def test_the_smallest_normal_probability_still_comes_before_impossible_tokens():
    smallest = math.log(torch.finfo(torch.float32).tiny) + 0.5
    logits = torch.tensor([0.0, -torch.inf, smallest, -90.0])
    draft = draft_distribution(logits[None], 1.0)[0]
    assert draft[2] > 0
    assert draft[3] == 0  # a subnormal: zero for the sampler and the verifier
    tokens = sample_without_replacement(logits.expand(1000, -1), 3, 1.0, generator(4))
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


# -- rows and generators -----------------------------------------------------------


def test_a_row_with_its_own_generator_ignores_its_neighbours():
    logits = torch.randn(6, 50, generator=generator(0))
    seeds = [11, 12, 13, 14, 15, 16]
    together = sample_without_replacement(logits, 7, 0.8, [generator(s) for s in seeds])
    for row, seed in enumerate(seeds):
        own = generator(seed)
        alone = sample_without_replacement(logits[row : row + 1], 7, 0.8, [own])
        assert torch.equal(alone[0], together[row])
    shuffled = [3, 0, 5, 1, 4, 2]
    again = sample_without_replacement(
        logits[shuffled], 7, 0.8, [generator(seeds[row]) for row in shuffled]
    )
    assert torch.equal(again, together[shuffled])


def test_rows_that_share_a_generator_draw_from_it_in_turn():
    logits = torch.zeros(5, 40)
    first, second = generator(1), generator(2)
    together = sample_without_replacement(logits, 5, 1.0, [first, first, second, second, second])
    assert torch.equal(together[:2], sample_without_replacement(logits[:2], 5, 1.0, generator(1)))
    assert torch.equal(together[2:], sample_without_replacement(logits[:3], 5, 1.0, generator(2)))
    assert not torch.equal(together[0], together[1])


def test_rows_without_a_generator_use_the_default_one_and_disturb_nobody():
    logits = torch.zeros(3, 40)
    torch.manual_seed(0)
    mixed = sample_without_replacement(logits, 5, 1.0, [None, generator(7), None])
    alone = sample_without_replacement(logits[:1], 5, 1.0, [generator(7)])
    assert torch.equal(mixed[1], alone[0])
    assert not torch.equal(mixed[0], mixed[2])
    torch.manual_seed(0)
    default = sample_without_replacement(logits, 5, 1.0)
    assert torch.equal(default[[0, 2]], mixed[[0, 2]])


def test_generators_advance_by_a_vocabulary_per_row_whatever_the_row_holds():
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [5.0, 5.0, 5.0]])
    temperatures = torch.tensor([0.0, 1.0])
    own = [generator(0), generator(0)]
    sample_without_replacement(logits, 1, temperatures, own)
    expected = generator(0)
    torch.rand(3, dtype=torch.float64, generator=expected)
    for one in own:
        assert torch.equal(one.get_state(), expected.get_state())


def test_a_greedy_float_temperature_takes_nothing_from_the_generator():
    own = generator(0)
    before = own.get_state()
    sample_without_replacement(torch.zeros(2, 5), 3, 0.0, own)
    assert torch.equal(own.get_state(), before)


# -- greedy, shapes, errors ----------------------------------------------------------

GRID_LOGITS = st.lists(
    st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]), min_size=5, max_size=5).filter(
        lambda row: max(row) > -math.inf
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(GRID_LOGITS, st.integers(1, 5), st.booleans(), st.sampled_from([0.0, 9e-6]))
def test_greedy_rows_are_the_largest_logits_in_order_and_begin_with_the_argmax(
    rows, k, as_tensor, zero
):
    logits = torch.tensor(rows)
    temperature = torch.full((len(rows),), zero) if as_tensor else zero
    tokens = sample_without_replacement(logits, k, temperature)
    assert torch.equal(logits.gather(1, tokens), logits.sort(descending=True).values[:, :k])
    draft = draft_distribution(logits, temperature)
    assert torch.equal(draft.argmax(dim=1), tokens[:, 0])
    assert torch.equal(draft, torch.nn.functional.one_hot(tokens[:, 0], 5).float())
    assert all(len(set(row)) == k for row in tokens.tolist())


@settings(deadline=None)
@given(GRID_LOGITS, st.integers(0, 5), st.floats(1e-4, 5.0))
def test_draws_are_distinct_and_possible_tokens_come_first(rows, k, temperature):
    logits = torch.tensor(rows)
    tokens = sample_without_replacement(logits, k, temperature)
    assert tokens.shape == (len(rows), k)
    draft = draft_distribution(logits, temperature)
    for row, drawn in enumerate(tokens.tolist()):
        assert len(set(drawn)) == k
        possible = int((draft[row] > 0).sum())
        assert all(draft[row, t] > 0 for t in drawn[:possible])


@settings(deadline=None)
@given(GRID_LOGITS, st.floats(1e-4, 5.0))
def test_draft_distribution_is_softmax(rows, temperature):
    logits = torch.tensor(rows)
    expected = torch.softmax(logits.double() / temperature, dim=1)
    draft = draft_distribution(logits, temperature)
    assert draft.dtype == torch.float32
    assert torch.allclose(draft.double(), expected, atol=1e-6)
    # The same bits for one temperature and for one per row.
    per_row = draft_distribution(logits, torch.full((len(rows),), temperature))
    assert torch.equal(draft, per_row)


def test_half_precision_logits_give_float32_probabilities():
    logits = torch.randn(3, 9, generator=generator(0)).bfloat16()
    assert torch.equal(draft_distribution(logits, 0.7), draft_distribution(logits.float(), 0.7))
    tokens = sample_without_replacement(logits, 4, torch.tensor([0.0, 1.0, 0.5]), generator(1))
    same = sample_without_replacement(
        logits.float(), 4, torch.tensor([0.0, 1.0, 0.5]), generator(1)
    )
    assert torch.equal(tokens[1:], same[1:])  # row 0 may order equal logits differently
    assert torch.equal(logits[0, tokens[0]], logits[0, same[0]])


def test_logits_are_left_alone():
    logits = torch.randn(2, 8, generator=generator(0))
    before = logits.clone()
    for temperature in (0.0, 1.0, torch.tensor([0.0, 1.0])):
        sample_without_replacement(logits, 3, temperature)
        draft_distribution(logits, temperature)
    assert torch.equal(logits, before)


def test_no_rows():
    assert sample_without_replacement(torch.empty(0, 5), 2, 1.0).shape == (0, 2)
    assert sample_without_replacement(torch.empty(0, 5), 2, 1.0, []).shape == (0, 2)


@pytest.mark.parametrize("k", [-1, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_tokens_than_the_vocabulary_are_refused(k, temperature):
    with pytest.raises(ValueError, match=f"cannot draw {k} different tokens"):
        sample_without_replacement(torch.zeros(1, 5), k, temperature)


def test_a_list_of_generators_needs_one_per_row():
    with pytest.raises(ValueError, match="1 generators for 2 rows"):
        sample_without_replacement(torch.zeros(2, 5), 1, 1.0, [generator(0)])
