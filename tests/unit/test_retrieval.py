"""What a request's own text says comes next, and how the draft prefers it."""

import random

import pytest
import torch

from sequoia_vllm.verification import retrieval
from sequoia_vllm.verification.retrieval import (
    LONGEST,
    SHORTEST,
    TOLD_SHARE,
    continuations,
    following,
    preferred,
)
from sequoia_vllm.verification.sampling import draft_distribution


def expected(text: list[int], depth: int) -> list[int]:
    """By trying every place, the latest first."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                ahead = text[end:]
                return [ahead[place % len(ahead)] for place in range(depth)]
    return [-1] * depth


@pytest.mark.parametrize("window", [16, 8192])
def test_continuations_are_those_of_the_latest_longest_match(window, monkeypatch):
    monkeypatch.setattr(retrieval, "WINDOW", window)
    draw = random.Random(1)
    texts = [[draw.randrange(4) for _ in range(draw.randint(1, 40))] for _ in range(300)]
    texts += [[2, 3] * 10, [1] * 9, [7], [7, 7], [1, 2, 3, 1, 2]]
    held = torch.full((len(texts), 41), 3, dtype=torch.int32)  # what is behind a text is no text
    for row, text in enumerate(texts):
        held[row, : len(text)] = torch.tensor(text)
    rows = torch.randperm(len(texts))
    lengths = torch.tensor([len(texts[row]) for row in rows.tolist()], dtype=torch.int32)
    found = continuations(held, rows, lengths, depth=5)
    assert found.tolist() == [expected(texts[row][-window:], 5) for row in rows.tolist()]
    assert (found[:, 0] >= 0).sum() > 100


def test_a_node_goes_on_with_the_match_if_it_has_its_token():
    told = torch.tensor([[3, 4, 5], [6, 7, -1]])
    assert following(torch.tensor([[9], [9]]), told, 0).tolist() == [[3], [6]]
    assert following(torch.tensor([[4, 9], [7, 9]]), told, 2).tolist() == [[5, -1], [-1, -1]]


def test_q_prefers_a_token_and_keeps_the_odds_of_the_others():
    torch.manual_seed(0)
    logits, given = torch.randn(5, 40), torch.tensor([7, -1, 40, 3, 0])
    logits[3, 3], logits[4] = 60.0, torch.tensor([-torch.inf] + 39 * [0.0])
    temperature = torch.tensor([0.5, 1.0, 1.0, 1.0, 2.0])
    plain = draft_distribution(logits, temperature)
    found = draft_distribution(logits, temperature, given=given)
    assert torch.equal(found[1:3], plain[1:3])
    assert found[3, 3] == 1.0
    for row, token in ((0, 7), (4, 0)):
        share = TOLD_SHARE / (1 - (1 - TOLD_SHARE) * plain[row, token])
        torch.testing.assert_close(found[row, token], share)
        others = torch.arange(40) != token
        odds = found[row, others] / plain[row, others]
        torch.testing.assert_close(odds, odds[:1].expand(39), rtol=1e-5, atol=0)
    assert preferred(logits, given).argmax(dim=1)[[0, 3, 4]].tolist() == [7, 3, 0]
