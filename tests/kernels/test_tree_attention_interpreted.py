"""Tree attention's kernels, run by Triton's interpreter, against plain attention in torch."""

import itertools

import pytest
import torch

from sequoia_vllm.kernels import tree_attention_kernels
from sequoia_vllm.kernels.node_masks import pack_ancestors
from sequoia_vllm.kernels.tree_attention import TreeAttentionWorkspace, choose_splits, choose_tile
from tests.support.attending import UNTOUCHED, Batch
from tests.support.chessboard import chessboard
from tests.support.own_trees import row_of_the_first
from tests.v2.launches import counted_launches


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch):
    """The interpreter multiplies the bit patterns of bfloat16: give it their values instead."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def exact(handle):
        if handle.dtype.scalar != bfloat16:
            return handle
        bits = handle.data.astype("uint32") << 16
        return TensorHandle(bits.view("float32"), float32)

    def patched(self, a, b, *rest):
        return create_dot(self, exact(a), exact(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", patched)


def splits_of(batch, processors):
    """How many splits `tree_attention` chooses for the batch."""
    _, heads, head_size = batch.query.shape
    _, block_size, key_heads, _ = batch.keys.shape
    rows = (len(batch.ancestors) - batch.first_node) * heads // key_heads
    tile = choose_tile(rows, head_size, batch.query.element_size(), 90)
    units = len(batch.contexts) * key_heads * -(-rows // tile.rows)
    return choose_splits(units, tile, processors, batch.table.shape[1] * block_size)


def assert_close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def check(batch, processors=1, *, splits=None, continued=False, max_queries=None, **how):
    """It is plain attention, in one of these numbers of splits."""
    assert splits is None or splits_of(batch, processors) in splits
    expected = batch.expected(**how)
    if how.get("window") is not None:
        batch.drop_blocks_before(how["window"])
    if max_queries is not None:
        how["max_queries"] = max_queries
    found, dtype = batch.run(processors, continued=continued, **how), batch.query.dtype
    steps = (3 + continued) * torch.finfo(dtype).eps
    assert_close(found, expected, 2e-5 if dtype == torch.float32 else steps)


FP8 = torch.float8_e4m3fn
SINKS = torch.tensor([-2.0, 0.0, 3.0, 9.0])
SCORES = [
    (0.7, None, torch.float32), (0.0, SINKS, torch.float32), (0.7, SINKS, torch.float32),
    (50.0, SINKS.half(), torch.float16),
]  # fmt: skip


def cases():
    """Batches, where they run, and how they attend; the names of those in shards end with Z."""
    # Query heads share key heads; on many processors with splits.
    for processors, *heads, block_size in (
        (1, 2, 2, 16),
        (110, 4, 1, 32),
        (1, 8, 1, 32),
        (110, 6, 2, 16),
    ):
        options = {"heads": heads, "block_size": block_size}
        yield "heads", ([37, 5], [7, 3]), options, processors, {}
    for head_size in (64, 80, 96, 128, 256, 512):
        small = {"heads": (2, 1), "head_size": head_size, "block_size": 48}
        yield "head size" + "Z" * (head_size in (80, 512)), ([40], [9]), small, 1, {}
    for dtype, sizes in itertools.product([torch.bfloat16, torch.float16], [(12, 40), (5, 2)]):
        yield "half precision", ([70, 0], sizes), {"dtype": dtype}, 1, {}
    for first, context in itertools.product([1, 31, 32, 45], [0, 20, 64]):
        options, later = {"first_node": first, "heads": (2, 1)}, first > 31 or context == 20
        name = "levels after the first" + "Z" * later
        yield name, ([context, context + 3], [5, 2]), options, 1, {}
    for first in (1, 32, 70):
        options = {"first_node": first, "heads": (2, 1)}
        yield "levels, context read", ([50, 3], [5, 2]), options, 1, {"continued": True}
    # A split is 256 positions here, and the tree of 7 may lie across two.
    for context in (0, 1, 250, 255, 256, 257, 505, 511, 512, 513, 700):
        options, later = {"heads": (2, 1), "spare_blocks": 45}, context in (0, 250, 505, 511, 700)
        how = {"splits": range(3, 9)}
        yield "ends of splits" + "Z" * later, ([context, 3], [7, 2]), options, 32, how
    for first, window in itertools.product([1, 32], [2, 20, 300]):
        options, name = {"first_node": first, "heads": (2, 1)}, "windows of levels"
        yield name + "Z" * (window == 20), ([500, 3], [5, 2]), options, 32, {"window": window}
    # Without and with splits: either with each of the scores, and with each window.
    for row, (soft_cap, sinks, dtype) in enumerate(SCORES):
        for turn, processors in enumerate((1, 110)):
            options = {"heads": (4, 2), "dtype": dtype}
            window = (None, 20, 300)[(row + turn) % 3]
            how = {"window": window, "soft_cap": soft_cap, "sinks": sinks}
            batch = ([600, 31, 0], [33, 7, 20])
            yield "soft caps and sinks", batch, options, processors, how
    # Keys of MLA, whose first channels are the values.
    for nodes, processors, size, extra in (
        (2, 1, 512, 64), (9, 32, 256, 64), (33, 1, 512, 64), (64, 32, 512, 32),
    ):  # fmt: skip
        options = {"heads": (3, 1), "head_size": size, "extra": extra}
        yield "latents", ([300, 31, 0], [nodes, 2, 1]), options, processors, {}
    options = {"heads": (4, 1), "head_size": 512, "extra": 64}
    options |= {"dtype": torch.bfloat16, "cache_dtype": FP8}
    scales = {"key_scale": 0.25, "value_scale": 0.25}
    yield "latents in fp8", ([300, 5], [9, 3]), options, 16, scales
    how = {"key_scale": 0.5, "value_scale": 1.5, "window": 30, "soft_cap": 1.0}
    yield "fp8 with a window", ([90], [4]), {"cache_dtype": FP8}, 1, how
    one = {"heads": (1, 1), "block_size": 64}
    yield "long contexts: longer splits", ([1300, 40], [4, 4]), one, 2, {"splits": [2]}
    yield "more splits than are merged at once", ([5000], [2]), one, 32, {"splits": [21]}
    # With splits, most rows see nothing at all in some of them.
    many = {"heads": (1, 1), "dtype": torch.float16, "spare_blocks": 0}
    yield "many nodes", ([10, 300], [1024, 5]), many, 1, {"splits": [1]}
    yield "many nodes", ([10, 300], [400, 5]), many, 100, {"splits": range(2, 99)}
    # A level of a larger tree: launched for its own rows only, with the same result.
    for bound in (None, 4):
        options = {"first_node": 10, "nodes": 200, "heads": (2, 1)}
        yield "bound on queries", ([300], [4]), options, 1, {"max_queries": bound}


CASES = [
    pytest.param(*rest, id=f"{name}-{at}", marks=[pytest.mark.sharded] * name.endswith("Z"))
    for at, (name, *rest) in enumerate(cases())
]


@pytest.mark.parametrize(("requests", "options", "processors", "how"), CASES)
def test_as_plain_attention(requests, options, processors, how):
    check(Batch(*requests, **options), processors, **how)


def in_turn(values, others):
    """Each value with one of the others, such as processors: without splits, and with."""
    return list(zip(values, itertools.cycle(others), strict=False))


@pytest.mark.parametrize(("uneven", "processors"), chessboard([False, True], [1, 110]))
def test_trees_of_all_sizes_in_one_batch(processors, uneven):
    """Requests without rows, and rows without requests, are left alone."""
    contexts, sizes = [0, 31, 32, 600, 64, 1, 0], [1, 0, 40, 33, 1, 5, 0]
    batch = Batch(contexts, sizes)
    # Nothing of a request without rows may be looked at.
    batch.contexts[1] = 2**30
    batch.table[1] = 2**30
    assert splits_of(batch, processors) == (1 if processors == 1 else 3)
    output = batch.run(processors, uneven=uneven)
    assert_close(output, batch.expected())
    assert (output[-3:] == UNTOUCHED).all()


def test_latents_of_uneven_requests():
    batch = Batch([700, 31, 0], [9, 2, 1], heads=(3, 1), head_size=256, extra=64)
    assert_close(batch.run(32, uneven=True), batch.expected())


@pytest.mark.parametrize(
    ("window", "processors"), in_turn([1, 4, 16, 33, 64, 130, 300, 5000, 2**40], [110, 1])
)
def test_windows_count_from_each_nodes_depth(window, processors):
    """Blocks before them are not the request's any more, and hold anything."""
    batch = Batch([600, 31, 0, 259], [33, 7, 20, 1], heads=(4, 2))
    assert (batch.expected(window=window) != batch.expected()).any() == (window < 600)
    check(batch, processors, window=window)


def test_large_scores_under_a_soft_cap():
    batch = Batch([40], [4])
    batch.query *= 1e6
    check(batch, soft_cap=2.0)


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
    assert splits_of(batch, processors=32) >= 3
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


@pytest.mark.parametrize("context", [0, 1, 31, 33, 64])
def test_each_node_sees_exactly_its_ancestors(context):
    """With queries of 0 each position seen has the same weight; values tell positions apart."""
    nodes, head_size = 60, 128
    batch = Batch([context], [nodes], heads=(1, 1), head_size=head_size, block_size=128)
    batch.query.zero_()
    batch.values[batch.table[0, 0], :, 0] = torch.eye(head_size)
    batch.values[batch.table[0, 1]] = 0.0
    seen = torch.zeros(nodes, head_size)
    seen[:, :context] = 1.0
    seen[:, context : context + nodes] = batch.ancestors
    expected = seen / seen.sum(dim=1, keepdim=True)
    assert torch.equal(batch.run()[:nodes, 0], expected)


@pytest.mark.parametrize(
    ("size", "heads", "processors", "window"),
    [
        (2, (2, 2), 1, None), (9, (4, 2), 8, None), (40, (8, 1), 1, None), (9, (2, 2), 8, None),
        *((9, (4, 2), 8, window) for window in (2, 9, 20, 5000)),
    ],
)  # fmt: skip
def test_blocks_whose_nodes_all_see_one_another(size, heads, processors, window):
    """For windows each of its nodes lies a position after the one before it."""
    batch = Batch([0, 37, 300], [size] * 3, heads=heads)
    batch.ancestors = torch.ones_like(batch.ancestors)
    check(batch, processors, window=window)


@pytest.mark.parametrize(
    ("how", "place"), chessboard([{}, {"window": 20}, {"continued": True}], [(0, 1), (32, 110)])
)
def test_each_request_has_a_tree_of_its_own(place, how, monkeypatch):
    first_node, processors = place
    batch = Batch([600, 31, 5, 0], [33, 7, 0, 20], heads=(4, 2), first_node=first_node)
    batch.give_own_trees()
    expected = batch.expected(window=how.get("window"))
    assert_close(batch.run(processors, **how), expected)
    monkeypatch.setattr(tree_attention_kernels, "shape_row", row_of_the_first)
    of_the_first = batch.run(processors, **how)
    differ = ((of_the_first - expected).abs() > 1e-3).flatten(1).any(dim=1)
    assert not differ[:33].any()
    assert differ[33:40].any()
    assert differ[40:60].any()


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
    batch.values = batch.values.clone()
    with pytest.raises(ValueError, match="must be the keys' first channels"):
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
