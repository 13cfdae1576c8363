"""The table that drafts without a model come from."""

import pytest
import torch

from sequoia_vllm.drafters.lookup import table
from sequoia_vllm.drafters.lookup.table import BY_RANK, OTHERS, SUCCESSORS, Successors

V = 20


def empty(dtype: torch.dtype = torch.float32) -> Successors:
    return Successors(V, dtype, torch.device("cpu"))


def after(successors: Successors, token: int) -> dict[int, float]:
    """Logits after a token, of the tokens that are not like most."""
    [row] = successors.logits(torch.tensor([token]))
    assert row.shape == (V,)
    return {place: value for place, value in enumerate(row.tolist()) if value != OTHERS}


def test_nothing_is_known_before_anything_was_scored():
    assert after(empty(), 3) == {}


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
    assert after(successors, 4) == {}


def test_many_rows_are_thinned_out():
    successors = empty()
    rows = table.MOST_LEARNED + 1
    successors.learn(torch.arange(rows) % 2, torch.zeros(rows, V))
    assert after(successors, 0) != {}
    assert after(successors, 1) == {}
