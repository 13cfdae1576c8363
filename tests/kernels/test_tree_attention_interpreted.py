"""Tree attention's kernels, run by Triton's interpreter, against plain attention in torch."""

import itertools

import pytest
import torch

from sequoia_vllm.kernels import tree_attention_kernels
from sequoia_vllm.kernels.attention_tiles import choose_splits, choose_tile
from sequoia_vllm.kernels.node_masks import NodeMask, NodeMasks, pack_ancestors
from sequoia_vllm.kernels.tree_attention import TreeAttentionWorkspace
from tests.oracles.attention import random_ancestors
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


def in_turn(values, others):
    """Each value with one of the others, such as processors: without splits, and with."""
    return list(zip(values, itertools.cycle(others), strict=False))


@pytest.mark.parametrize(
    ("heads", "block_size"), in_turn([(2, 2), (4, 1), (8, 1), (6, 2)], [16, 32, 32, 16])
)
def test_query_heads_share_key_heads(heads, block_size):
    batch = Batch([37, 5], [7, 3], heads=heads, block_size=block_size)
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256, 512])
def test_head_sizes(head_size):
    batch = Batch([40], [9], heads=(2, 1), head_size=head_size, block_size=48)
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("sizes", [(12, 40), (5, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, sizes):
    batch = Batch([70, 0], sizes, dtype=dtype)
    assert_close(batch.run(), batch.expected(), 3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("processors", [1, 110])
def test_trees_of_all_sizes_in_one_batch(processors):
    """Requests without rows, and rows without requests, are left alone."""
    contexts, sizes = [0, 31, 32, 600, 64, 1, 0], [1, 0, 40, 33, 1, 5, 0]
    batch = Batch(contexts, sizes)
    # Nothing of a request without rows may be looked at.
    batch.contexts[1] = 2**30
    batch.table[1] = 2**30
    assert splits_of(batch, processors) == (1 if processors == 1 else 3)
    output = batch.run(processors)
    assert_close(output, batch.expected())
    assert (output[-3:] == UNTOUCHED).all()


@pytest.mark.parametrize("first_node", [1, 31, 32, 45])
@pytest.mark.parametrize("context", [0, 20, 64])
def test_levels_after_the_first(first_node, context):
    batch = Batch([context, context + 3], [5, 2], first_node=first_node, heads=(2, 1))
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("context", [0, 1, 250, 255, 256, 257, 505, 511, 512, 513, 700])
def test_contexts_around_the_ends_of_splits(context):
    """A split is 256 positions here, and the tree of 7 may lie across two."""
    batch = Batch([context, 3], [7, 2], heads=(2, 1), spare_blocks=45)
    assert splits_of(batch, processors=32) >= 3
    assert_close(batch.run(processors=32), batch.expected())


@pytest.mark.parametrize(
    ("window", "processors"), in_turn([1, 4, 16, 33, 64, 130, 300, 5000, 2**40], [110, 1])
)
def test_windows_count_from_each_nodes_depth(window, processors):
    """Blocks before them are not the request's any more, and hold anything."""
    batch = Batch([600, 31, 0, 259], [33, 7, 20, 1], heads=(4, 2))
    expected = batch.expected(window=window)
    assert (expected != batch.expected()).any() == (window < 600)
    batch.drop_blocks_before(window)
    assert_close(batch.run(processors, window=window), expected)


@pytest.mark.parametrize("first_node", [1, 32])
@pytest.mark.parametrize("window", [2, 20, 300])
def test_windows_of_levels(first_node, window):
    batch = Batch([500, 3], [5, 2], first_node=first_node, heads=(2, 1))
    expected = batch.expected(window=window)
    batch.drop_blocks_before(window)
    assert_close(batch.run(32, window=window), expected)


@pytest.mark.parametrize(
    ("nodes", "processors", "size", "extra"),
    [(2, 1, 512, 64), (9, 32, 256, 64), (33, 1, 512, 64), (64, 32, 512, 32)],
)
def test_latents(nodes, processors, size, extra):
    """Keys of MLA, whose first channels are the values."""
    batch = Batch([300, 31, 0], [nodes, 2, 1], heads=(3, 1), head_size=size, extra=extra)
    assert_close(batch.run(processors), batch.expected())


def test_latents_in_fp8():
    batch = Batch(
        [300, 5], [9, 3], heads=(4, 1), head_size=512, extra=64, dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    scales = {"key_scale": 0.25, "value_scale": 0.25}
    tolerance = 3 * torch.finfo(torch.bfloat16).eps
    assert_close(batch.run(16, **scales), batch.expected(**scales), tolerance)


SCORES = [
    (0.7, False, torch.float32), (0.0, True, torch.float32), (0.7, True, torch.float32),
    (50.0, True, torch.float16),
]  # fmt: skip
WINDOWS = [None, 20, 300]


@pytest.mark.parametrize(
    ("soft_cap", "has_sinks", "dtype", "window", "processors"),
    [
        # Without and with splits: either with each of the scores, and with each window.
        (*scores, WINDOWS[(row + turn) % 3], (1, 110)[turn])
        for row, scores in enumerate(SCORES)
        for turn in range(2)
    ],
)
def test_soft_caps_and_sinks(soft_cap, has_sinks, dtype, window, processors):
    batch = Batch([600, 31, 0], [33, 7, 20], heads=(4, 2), dtype=dtype)
    sinks = torch.tensor([-2.0, 0.0, 3.0, 9.0]).to(dtype) if has_sinks else None
    how = {"window": window, "soft_cap": soft_cap, "sinks": sinks}
    expected = batch.expected(**how)
    if window is not None:
        batch.drop_blocks_before(window)
    tolerance = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert_close(batch.run(processors, **how), expected, tolerance)


def test_large_scores_under_a_soft_cap():
    batch = Batch([40], [4])
    batch.query *= 1e6
    assert_close(batch.run(soft_cap=2.0), batch.expected(soft_cap=2.0))


def test_an_fp8_cache_with_a_window():
    batch = Batch([90], [4], cache_dtype=torch.float8_e4m3fn)
    scales = {"key_scale": 0.5, "value_scale": 1.5}
    expected = batch.expected(**scales, window=30, soft_cap=1.0)
    assert_close(batch.run(**scales, window=30, soft_cap=1.0), expected)


def test_what_one_kernel_does_is_not_continued():
    batch = Batch([40], [4])
    for how in ({"window": 3}, {"soft_cap": 1.0}, {"sinks": torch.zeros(4)}):
        with pytest.raises(ValueError, match="give no context_lse"):
            batch.run(continued=True, **how)
    with pytest.raises(ValueError, match=r"sinks are \[3\]; expected \[4\]"):
        batch.run(sinks=torch.zeros(3))


def test_long_contexts_make_longer_splits():
    batch = Batch([1300, 40], [4, 4], heads=(1, 1), block_size=64)
    assert splits_of(batch, processors=2) == 2
    assert_close(batch.run(processors=2), batch.expected())


def test_short_contexts_are_not_split_where_their_length_is_known():
    """Nor is anything merged; the blocks would have room for four splits."""
    batch = Batch([200, 3], [7, 2], heads=(2, 1), spare_blocks=45)
    assert splits_of(batch, processors=32) >= 3
    with counted_launches() as launches:
        output = batch.run(processors=32, max_keys=207)
    assert_close(output, batch.expected())
    names = {name for _, _, name in launches.counts if name.endswith("_kernel")}
    assert names == {"tree_attention_kernel"}


@pytest.mark.parametrize("max_keys", [257, 600, 1 << 20])
def test_a_bound_on_keys_changes_no_result(max_keys):
    batch = Batch([200, 3], [7, 2], heads=(2, 1), spare_blocks=45)
    assert_close(batch.run(processors=32, max_keys=max_keys), batch.expected())


def test_more_splits_than_are_merged_at_once():
    batch = Batch([5000], [2], heads=(1, 1), block_size=64)
    assert splits_of(batch, processors=32) == 21
    assert_close(batch.run(processors=32), batch.expected())


@pytest.mark.parametrize(("nodes", "processors"), [(1024, 1), (400, 100)])
def test_trees_of_many_nodes(nodes, processors):
    """With splits, most rows see nothing at all in some of them."""
    batch = Batch([10, 300], [nodes, 5], heads=(1, 1), dtype=torch.float16, spare_blocks=0)
    assert (splits_of(batch, processors) > 1) == (processors > 1)
    assert_close(batch.run(processors), batch.expected(), 3 * torch.finfo(torch.float16).eps)


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


@pytest.mark.parametrize("first_node", [1, 32, 70])
def test_levels_after_a_context_that_another_kernel_read(first_node):
    batch = Batch([50, 3], [5, 2], first_node=first_node, heads=(2, 1))
    assert_close(batch.run(continued=True), batch.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_memory", [False, True])
def test_fp8_cache(dtype, in_memory):
    scales = {"key_scale": 1.5, "value_scale": 0.25}
    batch = Batch([50, 600], [9, 3], dtype=dtype, cache_dtype=torch.float8_e4m3fn)
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
    ("case", "processors"), in_turn([(2, (2, 2)), (9, (4, 2)), (40, (8, 1)), (9, (2, 2))], [1, 8])
)
def test_blocks_whose_nodes_all_see_one_another(case, processors):
    size, heads = case
    batch = Batch([0, 37, 300], [size] * 3, heads=heads)
    batch.ancestors = torch.ones_like(batch.ancestors)
    assert_close(batch.run(processors), batch.expected())


@pytest.mark.parametrize("window", [2, 9, 20, 5000])
def test_windows_of_blocks(window):
    """Each of its nodes lies a position after the one before it."""
    batch = Batch([0, 37, 300], [9] * 3, heads=(4, 2))
    batch.ancestors = torch.ones_like(batch.ancestors)
    expected = batch.expected(window=window)
    batch.drop_blocks_before(window)
    assert_close(batch.run(8, window=window), expected)


def test_a_wrong_mask_gives_another_answer():
    """Were masks ignored, the trees above would still have to tell."""
    batch = Batch([40], [33])
    causal = torch.ones_like(batch.ancestors).tril()
    differs = (batch.run() - batch.run(ancestors=causal)).abs().amax(dim=(1, 2)) > 1e-3
    assert differs[:33].tolist() == (batch.ancestors != causal).any(dim=1).tolist()
    assert differs.any()


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


def test_masks_follow_a_slots_tree():
    """In place, as a CUDA graph expects; with each window that layers have."""
    batch = Batch([600, 31], [33, 7])
    batch.give_own_trees()
    trees, masks, made = batch.ancestors.clone(), NodeMasks(), []
    made = [masks.of(trees, window) for window in (None, 3)]
    trees[1] = torch.eye(33, dtype=torch.bool)
    masks.repack(1)
    for mask, window in zip(made, (None, 3), strict=True):
        expected = NodeMask.of(trees, window)
        assert torch.equal(mask.words, expected.words)
        assert torch.equal(mask.depths, expected.depths)
        assert masks.of(trees, window) is mask


def test_tight_bound_on_queries():
    """A level of a larger tree: launched for its own rows only, with the same result."""
    batch = Batch([300], [4], first_node=10, nodes=200, heads=(2, 1))
    assert_close(batch.run(), batch.expected())
    assert_close(batch.run(max_queries=4), batch.expected())


def test_cache_of_more_than_2_to_the_31_elements():
    """Only the pages that are written take memory."""
    batch = Batch([20], [3], heads=(1, 1), cache_dtype=torch.float8_e4m3fn)
    expected = batch.expected()
    small = batch.keys, batch.values
    first = 2**31 // (16 * 64)
    batch.keys, batch.values = (
        torch.empty(first + len(cache), 16, 1, 64, dtype=torch.float8_e4m3fn) for cache in small
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


@pytest.mark.parametrize("processors", [1, 32])
@pytest.mark.parametrize("context", [40, 600])
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


def test_packing():
    ancestors = random_ancestors(70, torch.Generator().manual_seed(1))
    ancestors[33, 31] = True  # an int32's sign
    packed = pack_ancestors(ancestors)
    assert packed.dtype == torch.int32
    assert packed.shape == (70, 3)
    for node in range(70):
        bits = [packed[node, j // 32].item() >> j % 32 & 1 for j in range(96)]
        assert bits == [*ancestors[node].tolist(), *[0] * 26]


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
        Batch([4], [2], cache_dtype=torch.float8_e4m3fn).run(context_lse=lse)
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
