"""The commit kernel, run by Triton's interpreter, against a loop in torch."""

import pytest
import torch

from sequoia_vllm.kernels.commit import CacheLayers, commit_accepted
from tests.oracles.attention import commit_reference
from tests.support.committing import CONTEXTS, PATHS, bits, random_cache, tables


def check(caches, block_table, context_lens, accepted):
    """Moves with the kernel; all bytes of all caches must be the reference's."""
    expected = [cache.clone() for cache in caches]
    commit_reference(expected, block_table, context_lens.tolist(), accepted)
    commit_accepted(
        CacheLayers.of(caches),
        block_table=block_table,
        context_lens=context_lens,
        accepted=accepted,
    )
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits(cache), bits(wanted))


@pytest.mark.parametrize(
    ("dtype", "heads", "slots", "width"),
    [
        (torch.bfloat16, 2, 16, 32),
        (torch.float32, 1, 32, 24),
        (torch.float16, 3, 16, 10),  # a token's heads are moved 4 bytes at a time
        (torch.float8_e4m3fn, 2, 16, 36),
        (torch.uint8, 1, 16, 33),  # nor is that possible here: one byte
        (torch.bfloat16, 8, 16, 1024),  # more than one program per token
    ],
)
def test_paths_move_as_in_the_reference(dtype, heads, slots, width):
    torch.manual_seed(1)
    blocks = 6 * 4 + 1
    caches = [random_cache(blocks, heads, slots, width, dtype) for _ in range(2)]
    check(caches, tables(6, 4, blocks), CONTEXTS, PATHS)


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


def test_random_paths():
    torch.manual_seed(4)
    requests, depth, nodes, slots = 24, 7, 30, 16
    accepted = torch.full((requests, depth), -1, dtype=torch.int32)
    for request in range(requests):
        length = request % (depth + 1)
        path = torch.randperm(nodes - 1)[:length].sort().values + 1
        accepted[request, :length] = path.int()
    contexts = torch.randint(0, 40, (requests,), dtype=torch.int32)
    max_blocks = -(-(40 + nodes) // slots)
    blocks = requests * max_blocks
    caches = [random_cache(blocks, 2, slots, 8)]
    # A table wider than its view, as the engine's is.
    table = torch.nn.functional.pad(tables(requests, max_blocks, blocks), (0, 3), value=-1)
    check(caches, table[:, :max_blocks], contexts, accepted)


def test_a_cache_given_twice_moves_once():
    cache, table = random_cache(2, 1, 16, 8), torch.tensor([[1, 0]], dtype=torch.int32)
    contexts, accepted = torch.zeros(1, dtype=torch.int32), torch.tensor([[2, 3]]).int()
    check([cache, cache], table, contexts, accepted)


def test_nothing_is_read_for_padding():
    """Requests without a path have not even their table read: its entries may be anything."""
    for requests in (2, 0):
        table = torch.full((requests, 1), 2**31 - 1, dtype=torch.int32)
        contexts = torch.zeros(requests, dtype=torch.int32)
        paths = torch.full((requests, 3), -1, dtype=torch.int32)
        check([random_cache(2, 1, 16, 8)], table, contexts, paths)


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
