"""Prompts that the draft reads in one pass, with rows as they come."""

import torch

from sequoia_vllm.engine.v2.ragged_rows import last_rows


def test_last_rows_where_the_budget_ends():
    """The draft catches up: the second request has no row, and none is left past the first's."""
    first_rows = torch.tensor([0, 26, 26], dtype=torch.int32)
    counts = torch.tensor([25, 0], dtype=torch.int32)
    found = last_rows(first_rows, counts, total=26)
    assert found[0] == 24
    assert 0 <= found[1] < 26


def test_last_rows_of_requests_that_read():
    first_rows = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    counts = torch.tensor([2, 0, 5], dtype=torch.int32)
    found = last_rows(first_rows, counts, total=8)
    assert (found[0], found[2]) == (1, 7)
    assert 0 <= found[1] < 8
