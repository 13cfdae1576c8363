"""The table that drafts without a model come from."""

import numpy as np
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


def test_adapters_have_tables_of_their_own():
    """Of two, the one that was not used for longest gives its table to a third, emptied."""
    successors = Successors(V, torch.float32, torch.device("cpu"), adapters=2)
    token = torch.tensor([3])

    def known(adapter: int) -> list[int]:
        """What follows the token, the likeliest first."""
        rows = torch.from_numpy(successors.first_rows(np.array([adapter])))
        [row] = successors.logits(token, rows)
        return row.topk(2).indices.tolist() if row.max() > OTHERS else []

    ids = np.array([7, 0, 9, 7])
    rows = torch.from_numpy(successors.first_rows(ids))
    assert rows[0] == rows[3]
    assert len(set(rows.tolist())) == 3
    for adapter, best in ((7, 5), (0, 11), (9, 16)):
        logits = torch.zeros(1, V)
        logits[0, best], logits[0, best + 1] = 2, 1
        rows = torch.from_numpy(successors.first_rows(np.array([adapter])))
        successors.learn(token, logits, rows)
    assert [known(adapter) for adapter in (9, 0, 7)] == [[16, 17], [11, 12], [5, 6]]
    assert known(4) == []  # in the place of 9
    assert [known(adapter) for adapter in (0, 7)] == [[11, 12], [5, 6]]
    assert known(9) == []
