"""Tree attention's kernels, interpreted: how they are launched. `tests/ops` has their law."""

import itertools

import pytest
import torch

from sequoia_vllm.kernels.node_masks import pack_ancestors
from sequoia_vllm.kernels.tree_attention import TreeAttentionWorkspace, choose_splits, choose_tile
from tests.support.attending import UNTOUCHED, Batch
from tests.support.chessboard import chessboard
from tests.v2.launches import counted_launches

pytestmark = pytest.mark.usefixtures("bfloat16_products")
FP8 = torch.float8_e4m3fn


def assert_close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def in_turn(values, others):
    """Each value with one of the others, such as processors: without splits, and with."""
    return list(zip(values, itertools.cycle(others), strict=False))


def test_latents_of_uneven_requests():
    batch = Batch([700, 31, 0], [9, 2, 1], heads=(3, 1), head_size=256, extra=64)
    assert_close(batch.run(32, uneven=True), batch.expected())


def test_what_one_kernel_does_is_not_continued():
    batch = Batch([40], [4])
    for how in ({"window": 3}, {"soft_cap": 1.0}, {"sinks": torch.zeros(4)}):
        with pytest.raises(ValueError, match="give no context_lse"):
            batch.run(continued=True, **how)
    with pytest.raises(ValueError, match=r"sinks are \[3\]; expected \[4\]"):
        batch.run(sinks=torch.zeros(3))


def test_short_contexts_are_not_split_where_their_length_is_known():
    """Nor is anything merged; the blocks would have room for four splits."""
    batch = Batch([200, 3], [7, 2], heads=(2, 1), spare_blocks=45)
    assert batch.splits(processors=32) >= 3
    with counted_launches() as launches:
        output = batch.run(processors=32, max_keys=207)
    assert_close(output, batch.expected())
    names = {name for _, _, name in launches.counts if name.endswith("_kernel")}
    assert names == {"tree_attention_kernel"}


@pytest.mark.parametrize(
    ("heads", "dtype"), [((2, 2), torch.float32), ((2, 2), torch.float16), ((8, 1), torch.bfloat16)]
)
def test_nodes_after_a_context_that_another_kernel_read(dtype, heads):
    """Nothing of the context is read; where there is none, nodes see each other only."""
    contexts, sizes = [0, 31, 32, 600, 1, 0], [1, 0, 40, 33, 5, 7]
    batch = Batch(contexts, sizes, heads=heads, dtype=dtype)
    expected, (output, lse) = batch.expected(), batch.attend_to_contexts()
    block_size = batch.keys.shape[1]
    for row, context in zip(batch.table.tolist(), contexts, strict=True):
        for position in range(context):
            batch.keys[row[position // block_size], position % block_size] = float("nan")
    batch.attend_to_contexts = lambda: (output, lse)
    found = batch.run(processors=110, continued=True)
    assert_close(found, expected, 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)
    assert (found[-3:] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("dtype", "in_memory"), chessboard([torch.float32, torch.bfloat16], [False, True])
)
def test_fp8_cache(dtype, in_memory):
    scales = {"key_scale": 1.5, "value_scale": 0.25}
    batch = Batch([50, 600], [9, 3], dtype=dtype, cache_dtype=FP8)
    expected = batch.expected(**scales)
    if in_memory:
        scales = {name: torch.tensor(scale) for name, scale in scales.items()}
        batch.keys, batch.values = batch.keys.view(torch.uint8), batch.values.view(torch.uint8)
    tolerance = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert_close(batch.run(processors=16, **scales), expected, tolerance)


def test_scales_are_for_fp8_only():
    batch = Batch([20], [4])
    assert torch.equal(batch.run(), batch.run(key_scale=3.0, value_scale=5.0))


def test_padding_takes_some_tree():
    """A graph's requests that are not there have slot -1; the result is not used."""
    batch = Batch([60, 0], [9, 9])
    batch.give_own_trees()
    batch.slots[1] = -1
    expected = batch.expected()
    assert_close(batch.run()[:9], expected[:9])


def test_cache_of_more_than_2_to_the_31_elements():
    """Only the pages that are written take memory."""
    batch = Batch([20], [3], heads=(1, 1), cache_dtype=FP8)
    expected = batch.expected()
    small = batch.keys, batch.values
    first = 2**31 // (16 * 64)
    batch.keys, batch.values = (
        torch.empty(first + len(cache), 16, 1, 64, dtype=FP8) for cache in small
    )
    for large, cache in zip((batch.keys, batch.values), small, strict=True):
        large[first:] = cache
    batch.table += first
    assert_close(batch.run(), expected)


@pytest.mark.parametrize(("context", "processors"), in_turn([40, 44, 600, 600], [1, 32]))
def test_no_position_past_the_table_is_read(processors, context):
    """Nodes beyond the model's length: the table's row ends, and its neighbour in memory begins."""
    beyond = 20
    batch = Batch([context, 3], [33, 5], heads=(2, 1), spare_blocks=0)
    block_size = batch.keys.shape[1]
    columns = (context + 33 - beyond) // block_size
    kept = columns * block_size - context  # the nodes that have a place
    assert 0 < kept < 33
    expected = batch.expected()
    (poison,) = {*range(len(batch.keys))} - {*batch.table.flatten().tolist()}
    assert batch.keys[poison].isnan().all()
    wide = torch.full((2, columns + 8), poison, dtype=torch.int32)
    wide[:, :columns] = batch.table[:, :columns]
    batch.table = wide[:, :columns]
    output = batch.run(processors)
    has_place = torch.ones(len(output), dtype=torch.bool)
    has_place[kept:33] = False
    assert_close(output[has_place], expected[has_place])
    assert output.isfinite().all()


@pytest.mark.parametrize(("context", "processors"), chessboard([40, 600], [1, 32]))
def test_nodes_past_the_last_slot_are_not_read(processors, context):
    """The model's length ends within a block: the rest of it nobody writes."""
    batch = Batch([context, 3], [33, 5], heads=(2, 1))
    expected, kept = batch.expected(), 15
    batch.forget_from([context + kept, 8])
    output = batch.run(processors, max_slots=context + kept)
    has_slot = torch.ones(len(output), dtype=torch.bool)
    has_slot[kept:33] = False
    assert_close(output[has_slot], expected[has_slot])
    assert output.isfinite().all()


def test_no_requests():
    batch = Batch([4], [2])
    batch.contexts, batch.starts = batch.contexts[:0], batch.starts[:1]
    assert (batch.run() == UNTOUCHED).all()


def test_packing_refuses():
    with pytest.raises(ValueError, match="square"):
        pack_ancestors(torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="later node"):
        pack_ancestors(torch.ones(3, 3, dtype=torch.bool))


def test_refusals():
    with pytest.raises(ValueError, match=r"queries are torch\.float64"):
        Batch([4], [2], dtype=torch.float64).run()
    with pytest.raises(ValueError, match="does not fit queries"):
        Batch([4], [2], cache_dtype=torch.float16).run()
    batch = Batch([4], [2])
    with pytest.raises(ValueError, match="both tensors or both floats"):
        batch.run(key_scale=torch.tensor(1.0))
    batch.query = batch.query[:, :3]
    with pytest.raises(ValueError, match="do not fit a cache"):
        batch.run()
    batch = Batch([4], [2])
    lse = batch.attend_to_contexts()[1]
    for wrong in (lse.half(), lse[:, :-1], lse[:-1]):
        with pytest.raises(ValueError, match=r"context_lse is .*; expected float32 \[4, 5\]"):
            batch.run(context_lse=wrong)
    with pytest.raises(ValueError, match="last stride 1"):
        batch.run(context_lse=lse.T.contiguous().T)
    with pytest.raises(ValueError, match="give no context_lse"):
        Batch([4], [2], cache_dtype=FP8).run(context_lse=lse)
    batch.keys = batch.keys.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ValueError, match="side by side"):
        batch.run()
    with pytest.raises(ValueError, match="keys have 8 channels more than values"):
        Batch([4], [2], extra=8).run()
    batch = Batch([4], [2], extra=64)
    batch.values = batch.values[:, :8]
    with pytest.raises(ValueError, match="key and value cache differ in shape"):
        batch.run()


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("element_size", [2, 4])
def test_workspace_suffices_for_every_launch(capability, head_size, element_size):
    processors = 132
    size = TreeAttentionWorkspace.size_in_bytes(head_size, processors)
    launches = itertools.product(
        [1, 2, 9, 16, 33, 64, 100, 128, 129, 256, 520, 8192],
        [1, 2, 7, 8, 64, 131, 132, 133, 264, 5000],  # of request and key head
        [False, True],
    )
    most = 0
    for rows, pairs, windowed in launches:
        tile = choose_tile(rows, head_size, element_size, capability, windowed=windowed)
        units = pairs * -(-rows // tile.rows)
        splits = choose_splits(units, tile, processors, 1 << 17)
        if splits > 1:
            most = max(most, splits * units * tile.rows * (head_size + 1) * 4)
    assert 0 < most <= size
