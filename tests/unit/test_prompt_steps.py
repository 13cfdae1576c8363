"""What prompts add to steps, and the gain that is told, in steps whose times are known."""

import numpy as np
import pytest

from sequoia_vllm.adaptation.prompt_steps import Gain, PromptSteps
from sequoia_vllm.adaptation.step import Step

DRAFTED = np.array([0, 1])
TOKENS = np.array([1.0, 2.0])


def step(batch: int = 1, drafts: int = 0, prompts: int = 0, **more) -> Step:
    return Step(batch, drafts, None, "greedy", prompts=prompts, **more)


def added(prompts: PromptSteps, batch: int = 1, seconds: float = 0.0) -> list[float]:
    """What prompts add for each token without drafts, and with some."""
    table = np.full((2, 1), seconds)
    octave = np.array([batch.bit_length() - 1])
    return prompts.per_token(table, TOKENS, DRAFTED, octave)[:, 0].tolist()


def expected(more: float, share: float, usual_tokens: float, tokens: float) -> float:
    """What a share of steps that read prompts adds to each token, by ``tokens`` a step.

    The share was seen at the usual tokens. Where all steps read prompts, each step bears it; where
    few do, each token.
    """
    by_token = -np.log(1 - share) * (1 - share) / share
    return more * share / usual_tokens**by_token / tokens ** (1 - by_token)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_shares_are_of_a_batch_sizes_own_octave(batch):
    """Before the first step four count that read nothing and had a token."""
    prompts = PromptSteps(4, False)
    for _ in range(12):
        prompts.add(step(batch, 3, 7, gained=2 * batch), 5.0, 1.0, 0.0)
    share, usual = 12 / 16, (4 + 12 * 3) / 16
    found = [expected(4.0, share, usual, tokens) for tokens in TOKENS]
    assert added(prompts, batch) == pytest.approx(found)
    for other in (1, 2, 4, 8):
        if other.bit_length() != batch.bit_length():
            assert added(prompts, other) == pytest.approx([0.0, 0.0], abs=1e-4)


def test_shares_fade_by_a_fiftieth():
    prompts = PromptSteps(1, False)
    for _ in range(400):
        prompts.add(step(), 1.0, 1.0, 0.0)
    for _ in range(10):
        prompts.add(step(prompts=1), 3.0, 1.0, 0.0)
    assert added(prompts)[0] == pytest.approx(expected(2.0, 1 - 0.98**10, 1.0, 1.0))


def test_steps_without_prompts_have_their_share_of_drafting():
    """A prompt's step takes 5 s longer to read and 2 s to grow, beside 1 s of each."""
    bound, free = PromptSteps(1, True), PromptSteps(1, False)
    for _ in range(200):
        one = step(1, 3, 9, drafting=3.0)
        bound.add(one, 9.0, 2.0, 0.5)
        free.add(one, 9.0, 2.0, 0.5)
    share = 1 - 1e-6
    assert added(free, seconds=4.0) == pytest.approx(
        [expected(more, share, 1.0, tokens) for more, tokens in ((5.0, 1.0), (7.0, 2.0))], rel=0.02
    )
    assert added(bound, seconds=4.0) == pytest.approx([2.0, 5.0 / 2], rel=0.02)
    assert added(bound, seconds=8.0) == pytest.approx([0.0, 1.0 / 2], rel=0.02)


@pytest.mark.parametrize("drafts", [0, 3])
def test_drafting_is_noted_where_drafts_are_grown(drafts):
    """Every second step grows some, or none does; the others do not make its time less."""
    prompts = PromptSteps(1, True)
    for _ in range(100):
        prompts.add(step(1, drafts, 9, drafting=3.0 * (drafts > 0)), 9.0, 1.0, 0.0)
        prompts.add(step(1, 0, 9), 6.0, 1.0, 0.0)
    plain, drafted = added(prompts)
    assert plain == pytest.approx(6.0 if drafts else 7.5, rel=0.02)
    assert drafted == pytest.approx((plain + 3.0 * (drafts > 0)) / 2, rel=0.02)


def test_a_step_that_takes_far_longer_counts_as_three():
    prompts = PromptSteps(1, True)
    for seconds in (2.0, 2.0, 100.0):
        prompts.add(step(prompts=9), seconds, 1.0, 0.0)
    assert added(prompts)[0] == pytest.approx(expected((2 + 2 + 6) / 3, 3 / 7, 1.0, 1.0))
    for _ in range(96):
        prompts.add(step(prompts=9), 0.0, 1.0, 0.0)
    # Fifty steps are remembered.
    mean = 10 / 3 * np.prod([1 - 1 / min(count, 50) for count in range(4, 100)])
    share = 1 - 4 / 50 * 0.98 ** (99 - 46)
    assert added(prompts)[0] == pytest.approx(expected(mean, share, 1.0, 1.0), rel=1e-3)


def test_steps_that_take_less_than_without_prompts_add_nothing():
    prompts = PromptSteps(1, False)
    for _ in range(9):
        prompts.add(step(1, 3, 9, drafting=0.1), 0.5, 1.0, 0.4)
    assert added(prompts) == [0.0, 0.0]


class Times:
    """Plain steps take a second, with 3 drafts two; the machine is 1.5 times as slow today."""

    pace = 1.5

    def __init__(self, seen: int = 1) -> None:
        self.seen = np.array([seen, 9])

    @staticmethod
    def seconds(drafts: int, batch: int, context: int) -> float:
        return {0: 1.0, 3: 2.0}[drafts] * batch * (1 + context / 100)


def gain_of(*steps: tuple, times: Times | None = None) -> float | None:
    gain = Gain()
    for one, seconds, trees, drafting in steps:
        gain.add(one, seconds, trees, times or Times(), drafting)
    return gain.value


def test_plain_steps_gain_nothing_and_unknown_ones_say_nothing():
    assert gain_of((step(), 3.0, 0, 0.0)) == 1.0
    unknown = Times(0)
    assert gain_of((step(1, 3), 3.0, 0, 0.0), times=unknown) is None
    assert gain_of((step(before=3), 3.0, 1, 0.0), times=unknown) is None
    assert gain_of((step(), 3.0, 0, 0.0), times=unknown) == 1.0
    assert gain_of((step(), 0.0, 0, 0.0)) is None  # no time went by


@pytest.mark.parametrize(
    ("one", "trees"),
    [
        (step(2, 3, gained=3, context=100), 2),
        (step(2, 1, gained=3, context=100), 0),
        (step(2, 0, before=3, gained=3, context=100), 1),
    ],
)
def test_a_step_with_drafts_gains_what_plain_steps_would_take_for_its_tokens(one, trees):
    plain = 1.5 * 4.0 * (1 + 3 / 2)
    assert gain_of((one, 7.0, trees, 0.0)) == pytest.approx(plain / 7.0)


def test_a_steps_weight_halves_in_five_seconds():
    found = gain_of((step(1, 3, gained=1), 2.0, 1, 0.0), (step(), 5.0, 0, 0.0))
    assert found == pytest.approx((0.5 * 3.0 + 5.0) / (0.5 * 2.0 + 5.0))


@pytest.mark.parametrize("fast_at", [0, 1, 2])
def test_the_steps_of_an_answer_weigh_alike(fast_at):
    """Its client waited for all of them: when most was gained does not matter after its end."""
    gained = [9 if place == fast_at else 0 for place in range(3)]
    answer = [
        (step(1, 3, gained=each, follows=place > 0), 1.0, 1, 0.0)
        for place, each in enumerate(gained)
    ]
    assert gain_of(*answer) == pytest.approx((2 * 1.5 + 15.0) / 3)
    slower = (step(1, 3, gained=3, follows=False), 1.0, 1, 0.0)
    kept = 0.5 ** (1 / 5)
    assert gain_of(*answer, slower) == pytest.approx((18 * kept + 6.0) / (3 * kept + 1))


def test_an_answer_longer_than_five_seconds_is_not_one():
    steps = [(step(1, 3, gained=count), 2.0, 1, 0.0) for count in (9, 0, 0)]
    kept = 0.5 ** (2 / 5)
    assert gain_of(*steps) == pytest.approx((16.5 * kept + 1.5) / (4 * kept + 2))


@pytest.mark.parametrize(("trees", "drafting"), [(0, 0.0), (2, 0.0), (2, 0.25), (4, 0.9)])
def test_prompts_are_read_as_long_without_drafts(trees, drafting):
    """A step's time says so, less its drafting and the scoring of its trees."""
    one = step(4, 3, 50, drafting=0.5)
    plain = 1.5 * 4
    scoring = max(2 * plain * (1 - drafting) - plain, 0.0) * trees / 4
    assert gain_of((one, 40.0, trees, drafting)) == pytest.approx((40.0 - 0.5 - scoring) / 40.0)
    assert gain_of((one, 6.0, trees, drafting)) == 1.0  # reading takes no less than nothing
