"""The commit of accepted paths moves their keys and values as a loop in torch does."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from sequoia_vllm.attention import cpu_kernel
from sequoia_vllm.step.commit import TargetCaches
from tests.kernels.conftest import INTERPRETED
from tests.oracles.attention import commit_reference
from tests.support.caches import loaded, stored
from tests.support.committing import CONTEXTS, PATHS, bits, random_cache, tables

NODES = 32  # of the largest tree
# Of one byte; the second is of no larger unit.
ON_DEVICE = [(torch.float8_e4m3fn, 2, 16, 36), (torch.uint8, 1, 16, 33)] if INTERPRETED else []


def on_device(caches, block_table, contexts, accepted):
    from sequoia_vllm.kernels.commit import CacheLayers, commit_accepted

    layers = CacheLayers.of(caches)
    commit_accepted(layers, block_table=block_table, context_lens=contexts, accepted=accepted)
    yield caches


def on_host(caches, block_table, contexts, accepted):
    """By the compiled kernel, and by torch, in the layout of vLLM's CPU cache."""
    assert cpu_kernel.load_kernels() is not None
    places, size = torch.arange(NODES), caches[0].shape[2]
    positions = contexts[:, None] + places
    columns = (positions // size).clamp(max=block_table.shape[1] - 1)
    slots = block_table.long().gather(1, columns.long()) * size + positions % size
    rows, nodes = torch.arange(len(contexts)) * NODES, torch.full((len(contexts),), NODES)
    ways = [(cpu_kernel.load_kernels, False), (lambda: None, False)]
    if caches[0].element_size() == 2 and size % 16 == caches[0].shape[3] % 32 == 0:
        ways.append((cpu_kernel.load_kernels, True))
    for load, packed in ways:
        tree = SimpleNamespace(spoilt=False, is_packed=lambda cache, packed=packed: packed)
        metadata = SimpleNamespace(slot_mapping=slots.flatten(), tree=tree)
        own = {
            cache.data_ptr(): stored(cache.chunk(2, dim=3), cache.shape, packed) for cache in caches
        }
        layers = [own[cache.data_ptr()] for cache in caches]
        named = {str(place): layer for place, layer in enumerate(layers)}
        with patch.object(cpu_kernel, "load_kernels", load):
            TargetCaches().commit(named, dict.fromkeys(named, metadata), rows, nodes, accepted)
        yield [torch.cat(loaded(layer, packed), dim=3) for layer in layers]


def check(caches, block_table, context_lens, accepted):
    """All bytes of all caches are the reference's."""
    expected = [cache.clone() for cache in caches]
    commit_reference(expected, block_table, context_lens.tolist(), accepted)
    move = on_device if INTERPRETED else on_host
    for moved in move(caches, block_table, context_lens, accepted):
        for cache, wanted in zip(moved, expected, strict=True):
            assert torch.equal(bits(cache), bits(wanted))


@pytest.mark.parametrize(
    ("dtype", "heads", "slots", "width"),
    [
        (torch.bfloat16, 2, 16, 32),
        (torch.float32, 1, 32, 24),
        (torch.float16, 3, 16, 10),  # a token's heads are moved 4 bytes at a time
        (torch.bfloat16, 8, 16, 1024),  # more than one program per token
        *ON_DEVICE,
    ],
)
def test_paths_move_as_in_the_reference(dtype, heads, slots, width):
    torch.manual_seed(1)
    blocks = 6 * 4 + 1
    caches = [random_cache(blocks, heads, slots, width, dtype) for _ in range(2)]
    check(caches, tables(6, 4, blocks), CONTEXTS, PATHS)


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
