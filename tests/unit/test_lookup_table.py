"""The table and the match that drafts without a model come from."""

import random

import pytest
import torch

from sequoia_vllm.drafters.lookup import table
from sequoia_vllm.drafters.lookup.table import (
    BY_RANK,
    LONGEST,
    MATCHED,
    OTHERS,
    SHORTEST,
    SUCCESSORS,
    Successors,
    continuations,
)

V = 20


def empty(dtype: torch.dtype = torch.float32) -> Successors:
    return Successors(V, dtype, torch.device("cpu"))


def after(successors: Successors, token: int, matched: int = -1) -> dict[int, float]:
    """Logits after a root, of the tokens that are not like most."""
    row = successors.logits(torch.tensor([[token]]), torch.tensor([[matched]]), 0)[0]
    assert row.shape == (V,)
    return {place: value for place, value in enumerate(row.tolist()) if value != OTHERS}


def test_nothing_is_known_before_anything_was_scored():
    assert after(empty(), 3) == {}
    assert after(empty(), 3, matched=7) == {7: MATCHED}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_latest_likeliest_tokens_are_kept(dtype):
    """Of two rows of one token, the later one's."""
    successors = empty(dtype)
    order = torch.stack([torch.randperm(V) for _ in range(3)])
    logits = torch.empty(3, V).scatter_(1, order, -torch.arange(V).float().expand(3, V))
    successors.learn(torch.tensor([5, 9, 5], dtype=torch.int32), logits)
    for token, row in ((5, 2), (9, 1)):
        best = order[row, :SUCCESSORS].tolist()
        assert after(successors, token) == dict(zip(best, BY_RANK, strict=True))
        found = after(successors, token, matched=best[3])
        assert found == {**dict(zip(best, BY_RANK, strict=True)), best[3]: MATCHED}
    assert after(successors, 4) == {}


def test_many_rows_are_thinned_out():
    successors = empty()
    rows = table.MOST_LEARNED + 1
    successors.learn(torch.arange(rows) % 2, torch.zeros(rows, V))
    assert after(successors, 0) != {}
    assert after(successors, 1) == {}


def test_a_node_goes_on_with_the_match_if_it_has_its_token():
    told = torch.tensor([[3, 4, 5], [6, 7, -1]])
    nodes = torch.tensor([[4, 9], [7, 9]])
    found = empty().logits(nodes, told, 2)
    assert (found != OTHERS).nonzero().tolist() == [[0, 5]]


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
    monkeypatch.setattr(table, "WINDOW", window)
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
