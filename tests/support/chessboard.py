"""Slow combinations of parameters, half of which are left to the shards."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def chessboard(*axes: Iterable[Any]) -> list[Any]:
    """All combinations, for `parametrize`; CI runs those that are white on a chessboard.

    So each value of an axis still meets values of every other axis.
    """
    return [
        pytest.param(
            *(value for _, value in places),
            marks=[pytest.mark.sharded] * (sum(place for place, _ in places) % 2),
        )
        for places in product(*map(enumerate, axes))
    ]
