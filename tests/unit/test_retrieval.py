"""Drafts from text: how Q prefers what a request's own says, and the table of successors."""

import numpy as np
import pytest
import torch

from sequoia_vllm.drafters.lookup import table
from sequoia_vllm.drafters.lookup.table import BY_RANK, OTHERS, SUCCESSORS, Successors
from sequoia_vllm.verification import retrieval
from sequoia_vllm.verification.sampling import draft_distribution


def test_a_node_goes_on_with_the_match_if_it_has_its_token():
    told = torch.tensor([[3, 4, 5], [6, 7, -1]])
    found = retrieval.following(torch.tensor([[9], [9]]), told, 0)
    assert found.tolist() == [[3], [6]]
    found = retrieval.following(torch.tensor([[4, 9], [7, 9]]), told, 2)
    assert found.tolist() == [[5, -1], [-1, -1]]


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
        share = retrieval.TOLD_SHARE / (1 - (1 - retrieval.TOLD_SHARE) * plain[row, token])
        torch.testing.assert_close(found[row, token], share)
        others = torch.arange(40) != token
        odds = found[row, others] / plain[row, others]
        torch.testing.assert_close(odds, odds[:1].expand(39), rtol=1e-5, atol=0)
    assert retrieval.preferred(logits, given).argmax(dim=1)[[0, 3, 4]].tolist() == [7, 3, 0]


V = 20


def empty(dtype: torch.dtype = torch.float32, **more) -> Successors:
    return Successors(V, dtype, torch.device("cpu"), **more)


def after(successors: Successors, token: int) -> dict[int, float]:
    """Logits after a token, of the tokens that are not like most."""
    [row] = successors.logits(torch.tensor([token]))
    assert row.shape == (V,)
    return {place: value for place, value in enumerate(row.tolist()) if value != OTHERS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_latest_likeliest_tokens_are_kept(dtype):
    """Of two rows of one token, the later one's."""
    successors = empty(dtype)
    assert after(successors, 3) == {}
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
    successors, token = empty(adapters=2), torch.tensor([3])

    def rows_of(*adapters: int) -> torch.Tensor:
        return torch.from_numpy(successors.first_rows(np.array(adapters)))

    def known(adapter: int) -> list[int]:
        """What follows the token, the likeliest first."""
        [row] = successors.logits(token, rows_of(adapter))
        return row.topk(2).indices.tolist() if row.max() > OTHERS else []

    rows = rows_of(7, 0, 9, 7)
    assert rows[0] == rows[3]
    assert len(set(rows.tolist())) == 3
    for adapter, best in ((7, 5), (0, 11), (9, 16)):
        logits = torch.zeros(1, V)
        logits[0, best], logits[0, best + 1] = 2, 1
        successors.learn(token, logits, rows_of(adapter))
    assert [known(adapter) for adapter in (9, 0, 7)] == [[16, 17], [11, 12], [5, 6]]
    assert known(4) == []  # in the place of 9
    assert [known(adapter) for adapter in (0, 7)] == [[11, 12], [5, 6]]
    assert known(9) == []
