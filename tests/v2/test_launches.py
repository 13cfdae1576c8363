"""The counter of launches: what counts, and what does not."""

import torch

from tests.v2.launches import OTHERS, counted_launches


def counted(function):
    with counted_launches() as launches, torch.inference_mode():
        function()
    return {name: count for (group, _, name), count in launches.counts.items() if group == OTHERS}


def test_views_and_allocations_launch_nothing():
    assert counted(lambda: torch.empty(6).view(2, 3)[:, 1:].transpose(0, 1).float()) == {}


def test_operators_count_as_what_they_are_made_of():
    values = torch.zeros(2, 3)[:, 1:]

    def some_operators():
        values.zero_()
        values.int()
        values.reshape(-1)  # of rows with gaps: a copy
        torch.where(values > 0, values, 0.0)

    assert counted(some_operators) == {"zero_": 1, "_to_copy": 1, "clone": 1, "gt": 1, "where": 1}


def test_nothing_is_counted_outside():
    with counted_launches() as launches:
        pass
    torch.zeros(3).add_(1)
    assert not launches.counts
