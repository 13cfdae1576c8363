"""The commit kernel's caches; `tests/ops/test_move.py` has its law."""

import pytest
import torch

from sequoia_vllm.kernels.commit import CacheLayers, commit_accepted
from tests.ops.test_move import check
from tests.support.committing import CONTEXTS, PATHS, random_cache, tables


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)])
def test_every_order_of_dimensions_in_memory(order):
    torch.manual_seed(2)
    shape = (25, 3, 16, 8)
    backwards = [order.index(dimension) for dimension in range(4)]
    caches = [
        random_cache(*(shape[dimension] for dimension in order)).permute(backwards)
        for _ in range(2)
    ]
    assert caches[0].shape == shape
    check(caches, tables(6, 4, 25), CONTEXTS, PATHS)


def test_the_largest_unit_that_fits_is_moved():
    assert CacheLayers.of([random_cache(2, 2, 16, 32)]).unit == 8
    assert CacheLayers.of([random_cache(2, 2, 16, 10)]).unit == 4
    misaligned = torch.zeros(2 * 2 * 16 * 32 + 1, dtype=torch.bfloat16)[1:].view(2, 2, 16, 32)
    assert CacheLayers.of([misaligned]).unit == 2


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([], "no caches"),
        ([torch.zeros(2, 16, 8)], "must be"),
        ([torch.zeros(2, 1, 8, 16).transpose(2, 3)], "must be"),
        ([torch.zeros(2, 1, 16, 8), torch.zeros(2, 1, 16, 8).half()], "another kind"),
        ([torch.zeros(2, 1, 16, 8), torch.zeros(2, 1, 16, 16)], "differ in layout"),
        ([torch.zeros(2, 2, 16, 8), torch.zeros(2, 16, 2, 8).transpose(1, 2)], "differ in layout"),
    ],
)
def test_caches_that_cannot_move_together_are_refused(caches, message):
    with pytest.raises(ValueError, match=message):
        CacheLayers.of(caches)


def test_rows_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="paths of 2 requests"):
        commit_accepted(
            CacheLayers.of([torch.zeros(2, 1, 16, 8)]),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            context_lens=torch.zeros(2, dtype=torch.int32),
            accepted=torch.zeros(2, 3, dtype=torch.int32),
        )
