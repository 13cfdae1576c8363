"""Prompts that the draft reads in one pass, with rows as they come."""

from types import SimpleNamespace

import numpy as np
import torch

from sequoia_vllm.engine.v2.drafting.ragged_rows import RaggedRows, last_rows


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


def slots_of(requests, query_start_loc, positions, has_slot):
    """In the place of `DraftCache.slots`: a hundred positions of each request."""
    request = torch.searchsorted(query_start_loc[1:], torch.arange(len(positions)), right=True)
    return torch.where(has_slot, 100 * request + positions, -1)[None]


def test_rows_follow_what_is_read_and_not_what_might_be():
    """Attention takes in all rows of a request: there is none that nobody writes a key for."""
    batch = SimpleNamespace(num_reqs=4, idx_mapping=torch.arange(4, dtype=torch.int32))
    reading = SimpleNamespace(
        starts=torch.tensor([7, 40, 0, 3, 99], dtype=torch.int32),
        counts=torch.tensor([2, 0, 3, 1, 99], dtype=torch.int32),
    )
    cache = SimpleNamespace(slots=slots_of, windows={})
    bounds = np.array([4, 2, 3, 5], dtype=np.int32)
    rows = RaggedRows.of(batch, bounds, reading, cache)
    assert rows.first.tolist() == [0, 2, 2, 5, 6]
    assert rows.most_np.tolist() == [0, 4, 6, 9, 14]
    assert rows.requests[:6].tolist() == [0, 0, 2, 2, 2, 3]
    assert rows.offsets[:6].tolist() == [0, 1, 0, 1, 2, 0]
    assert rows.positions[:6].tolist() == [7, 8, 0, 1, 2, 3]
    assert rows.slots[0].tolist() == [7, 8, 200, 201, 202, 303, *[-1] * 8]
    assert (len(rows.requests), rows.last.tolist()) == (14, [1, 1, 4, 5])
    assert rows.requests.max() < 4
