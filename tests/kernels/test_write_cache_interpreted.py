"""A step's keys and values in the cache, and who sees what is not finite there.

`tests/v2/test_gpu_attention_v2.py` compares it with vLLM's own kernel.
"""

import math

import pytest
import torch

from sequoia_vllm.kernels.write_cache import write_cache
from tests.support.attending import Batch
from tests.support.committing import bits, random_cache

FP8 = torch.float8_e4m3fn
HEADS, BLOCKS, SIZE = 3, 4, 16
SLOTS = torch.tensor([5, 63, -1, 16, 0])
SCALES = torch.tensor([0.5]), torch.tensor([1.5])


def case(dtype, cache_dtype, key_size, value_size):
    """Keys and values as rows of one product, of more tokens than slots; a cache."""
    torch.manual_seed(3)
    width = key_size + value_size
    product = torch.randn(len(SLOTS) + 2, HEADS * width + 7).to(dtype)
    sizes = HEADS * key_size, HEADS * value_size
    keys, values, _ = product.split((*sizes, 7), dim=1)
    cache = random_cache(BLOCKS, HEADS, SIZE, width, cache_dtype).transpose(1, 2)
    return keys.unflatten(1, (HEADS, -1)), values.unflatten(1, (HEADS, -1)), cache


def in_torch(rows, scale, dtype):
    return (rows.float() / scale).clamp(-448, 448).to(dtype) if dtype == FP8 else rows.to(dtype)


@pytest.mark.parametrize(("dtype", "cache_dtype", "sizes"), [
    (torch.bfloat16, torch.bfloat16, (128, 128)), (torch.float32, torch.float32, (80, 80)),
    (torch.float16, FP8, (64, 64)), (torch.bfloat16, FP8, (192, 128)),
    (torch.float16, torch.float16, (64, 512)),
])  # fmt: skip
@pytest.mark.parametrize("exactly", [True, False])
def test_rows_are_written_to_their_slots(dtype, cache_dtype, sizes, exactly):
    """Nothing else changes; a row without a slot writes nothing."""
    keys, values, cache = case(dtype, cache_dtype, *sizes)
    keys[0, 1, 3] = math.inf  # keys stay what they are; fp8 has its largest number for it
    expected, places = bits(cache.clone()).unflatten(3, (sum(sizes), -1)), SLOTS[SLOTS >= 0]
    new = zip((keys, values), SCALES, strict=True)
    parts = [in_torch(rows[: len(SLOTS)], scale, cache_dtype) for rows, scale in new]
    written = torch.cat(parts, dim=2)[SLOTS >= 0].contiguous()
    expected[places // SIZE, places % SIZE] = bits(written).view(len(places), *expected.shape[2:])
    write_cache(keys, values, *cache.split(sizes, dim=3), SLOTS, *SCALES, exactly)
    assert torch.equal(bits(cache), expected.flatten(3))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_0_and_its_key_nan(value):
    """Of its own token and head alone."""
    keys, values, cache = case(torch.float32, torch.float32, 16, 16)
    values[3, 2, 9] = value
    write_cache(keys, values, *cache.split(16, dim=3), SLOTS, *SCALES, divides_exactly=True)
    assert cache[1, 0, 2].isnan().tolist() == [True] * 16 + [False] * 16
    assert not cache[1, 0, 2, 16:].any()
    assert torch.equal(cache[1, 0, :2], torch.cat([keys, values], dim=2)[3, :2])
    assert torch.equal(cache[0, 5], torch.cat([keys, values], dim=2)[0])


def spoil(batch, node, value, parts):
    """The first request's node gets this value in the last key head, as a step writes it."""
    position, size = int(batch.contexts[0]) + node, batch.keys.shape[1]
    block, place = int(batch.table[0, position // size]), position % size
    caches = [batch.keys, batch.values]
    if batch.keys.data_ptr() == batch.values.data_ptr():  # latents
        caches[0] = batch.keys[..., batch.values.shape[3] :]
    new = [cache[block, place][None].to(batch.query.dtype) for cache in caches]
    for part in new[parts]:
        part[0, -1, 3] = value
    one = torch.ones(1)
    write_cache(*new, *caches, torch.tensor([block * size + place]), one, one, True)


LATENTS = {"heads": (4, 1), "head_size": 256, "extra": 64}
LARGER_KEYS = {"head_size": 128, "extra": 64, "has_values": True}
HOW = [
    ({}, 300, {}), ({}, 300, {"uneven": True}), ({}, 300, {"window": 40}), ({}, 70, {"chunk": 64}),
    ({"dtype": torch.float16}, 70, {"soft_cap": 3.0}), ({}, 70, {"continued": True}),
    (LARGER_KEYS, 70, {"sinks": torch.tensor([-2.0, 0.0, 3.0, 9.0])}), (LATENTS, 70, {}),
]  # fmt: skip
WRITTEN = [
    (value, parts, *how)
    for how in HOW
    for value, parts in ((math.nan, slice(2)), (math.inf, slice(1, 2)))  # values alone
]
IN_FP8 = {"dtype": torch.float16, "cache_dtype": FP8}


@pytest.mark.parametrize(
    ("value", "parts", "options", "context", "how"),
    [*WRITTEN, (math.nan, slice(2), IN_FP8, 70, {}), (math.nan, slice(1, 2), IN_FP8, 70, {})],
)
def test_what_is_not_finite_reaches_only_the_nodes_that_see_it(value, parts, options, context, how):
    """With splits where the context is long. All other rows are the same to the bit."""
    batch, node = Batch([context, 2], [6, 5], **options), 2
    before = batch.run(110, **how)
    spoil(batch, node, value, parts)
    after = batch.run(110, **how)
    sees = torch.zeros(before.shape[:2], dtype=torch.bool)
    sees[:6, -(sees.shape[1] // batch.keys.shape[2]) :] = batch.ancestors[:6, node, None]
    assert 1 < sees.any(dim=1).sum() < 6 - node
    assert after[sees].isnan().all()
    assert torch.equal(after[~sees], before[~sees])
