"""Tree attention is plain attention: every node sees its context, its ancestors and itself."""

import itertools
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from sequoia_vllm.attention.cpu_kernel import PACKED_ISA, TreeQueries, load_kernels
from tests.kernels.conftest import INTERPRETED
from tests.support.attending import UNTOUCHED, Batch
from tests.support.builds import attention_for_avx2
from tests.support.caches import stored
from tests.support.chessboard import chessboard

pytestmark = pytest.mark.usefixtures("bfloat16_products")


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- both implementations --------------------------------------------------------------------


def on_device(batch, processors, splits=None, **how):
    """What the kernels give, in one of these numbers of splits."""
    assert splits is None or batch.splits(processors) in splits
    yield batch.run(processors, **how)


def on_host(batch, window=None, soft_cap=0.0, sinks=None):
    """What the compiled kernel gives, by two threads for long contexts, and what torch gives."""
    from sequoia_vllm.engine.runner import cpu_attention

    assert load_kernels() is not None
    starts, first = batch.starts.long(), batch.first_node
    requests = starts.diff().nonzero().flatten()
    sizes, contexts = starts.diff()[requests], batch.contexts[requests].long()
    nodes = torch.arange(int(sizes.max()))
    rows = torch.where(nodes < sizes[:, None], starts[requests, None] + nodes, -1)
    own, ends, end = batch.ancestors.ndim == 3, first + sizes, first + len(nodes)
    ancestors = batch.ancestors[batch.slots[requests]] if own else batch.ancestors
    trees = TreeQueries(
        rows, batch.table[requests], contexts, ends, ancestors[..., first:end, :end],
        int((contexts + ends).max()), only_trees=True,
    )  # fmt: skip
    blocks, block_size, key_heads, head_size = batch.keys.shape
    shape, dtype = (blocks, key_heads, block_size, 2 * head_size), batch.keys.dtype
    sets = ["vec"]
    if dtype == torch.bfloat16 and block_size % 16 == head_size % 16 == 0:
        sets.append(PACKED_ISA)
    given = [part.transpose(1, 2) for part in (batch.keys, batch.values)]
    caches = [stored(given, shape, isa == PACKED_ISA) for isa in sets]
    impl = object.__new__(cpu_attention.CPUTreeAttentionImpl)
    vars(impl).update(
        num_heads=batch.query.shape[1], num_kv_heads=key_heads, head_size=head_size, sinks=sinks,
        scale=batch.scale, sliding_window=window, logits_soft_cap=soft_cap,
    )  # fmt: skip
    ways = [(2, load_kernels)] * bool(contexts.max() > 999)
    ways += [(1, load_kernels), (1, attention_for_avx2)]
    if dtype == torch.float32:
        ways.append((1, lambda: None))
    for (isa, cache), (threads, load) in itertools.product(zip(sets, caches, strict=True), ways):
        torch.set_num_threads(threads)
        trees._batches.clear()
        vars(impl).pop("_shape", None)
        output = torch.full_like(batch.query, UNTOUCHED)
        with patch.object(cpu_attention, "load_kernels", load):
            impl._forward_trees(SimpleNamespace(isa=isa), batch.query, cache, trees, output)
        yield output.float()


def attended(batch, processors=1, **how):
    """What each implementation gives that runs in this process."""
    return on_device(batch, processors, **how) if INTERPRETED else on_host(batch, **how)


# How a launch is cut and what it is told of its batch; the host has no such choice.
OF_LAUNCHES = {"splits", "continued", "max_queries", "uneven"}
HOST_ERRORS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def check(batch, processors=1, **how):
    """It is plain attention, and rows that are no request's are left alone."""
    of_law = {name: value for name, value in how.items() if name not in OF_LAUNCHES}
    expected, dtype = batch.expected(**of_law), batch.query.dtype
    if before := {name: how[name] for name in ("window", "chunk") if how.get(name) is not None}:
        batch.drop_blocks_before(**before)
    if INTERPRETED:
        steps = (3 + how.get("continued", False)) * torch.finfo(dtype).eps
        error = relative = 2e-5 if dtype == torch.float32 else steps
    else:
        error, relative, how = HOST_ERRORS[dtype], 0, of_law
    for found in attended(batch, processors, **how):
        torch.testing.assert_close(found, expected, atol=error, rtol=relative)


# -- cases -----------------------------------------------------------------------------------


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
    one = {"heads": (1, 1), "block_size": 64}
    yield "long contexts: longer splits", ([1300, 40], [4, 4]), one, 2, {"splits": [2]}
    yield "more splits than are merged at once", ([5000], [2]), one, 32, {"splits": [21]}
    # With splits, most rows see nothing at all in some of them.
    many = {"heads": (1, 1), "dtype": torch.float16, "spare_blocks": 0}
    yield "many nodes", ([10, 300], [1024, 5]), many, 1, {"splits": [1]}
    yield "many nodes", ([10, 300], [400, 5]), many, 100, {"splits": range(2, 99)}
    # For windows each node of a block lies a position after the one before it.
    for size, heads, processors, window in (
        (2, (2, 2), 1, None), (9, (4, 2), 8, None), (40, (8, 1), 1, None), (9, (2, 2), 8, None),
        *((9, (4, 2), 8, window) for window in (2, 9, 20, 5000)),
    ):  # fmt: skip
        block = {"heads": heads, "is_block": True}
        yield "blocks", ([0, 37, 300], [size] * 3), block, processors, {"window": window}
    # A level of a larger tree: launched for its own rows only, with the same result.
    for bound in (None, 4):
        options = {"first_node": 10, "nodes": 200, "heads": (2, 1)}
        bounds = {} if bound is None else {"max_queries": bound}
        yield "bound on queries", ([300], [4]), options, 1, bounds


def device_cases():
    """Caches that the host does not have."""
    # Keys of MLA, whose first channels are the values.
    for nodes, processors, size, extra in (
        (2, 1, 512, 64), (9, 32, 256, 64), (33, 1, 512, 64), (64, 32, 512, 32),
    ):  # fmt: skip
        options = {"heads": (3, 1), "head_size": size, "extra": extra}
        yield "latents", ([300, 31, 0], [nodes, 2, 1]), options, processors, {}
    options = {"heads": (4, 1), "head_size": 512, "extra": 64}
    for processors in (1, 32):
        yield "latents and sinks", ([300, 31, 0], [9, 2, 1]), options, processors, {"sinks": SINKS}
    # Chunks end in contexts, at roots, within trees; the last tree lies in the second chunk.
    batch, chunks = ([62, 130, 0, 64, 31, 63, 96], [33, 7, 20, 5, 40, 1, 9]), {"chunk": 64}
    for processors, block_size in ((1, 16), (110, 32)):
        options = {"heads": (4, 2), "block_size": block_size}
        yield "chunks", batch, options, processors, chunks
        yield "chunks of uneven requests", batch, options, processors, {**chunks, "uneven": True}
    # As MiMo-V2 has it: keys of 192 channels, values of 128, in half of the layers with the rest.
    for processors, how in ((1, {}), (110, {"window": 20, "sinks": SINKS})):
        options = {"heads": (4, 2), "head_size": 128, "extra": 64, "has_values": True}
        yield "larger keys", ([600, 31, 0], [9, 33, 1]), options, processors, how
    options |= {"dtype": torch.bfloat16, "cache_dtype": FP8}
    yield "larger keys in fp8", ([90], [4]), options, 1, {"key_scale": 0.5, "value_scale": 1.5}
    options = {"heads": (4, 1), "head_size": 512, "extra": 64}
    options |= {"dtype": torch.bfloat16, "cache_dtype": FP8}
    scales = {"key_scale": 0.25, "value_scale": 0.25}
    yield "latents in fp8", ([300, 5], [9, 3]), options, 16, scales
    how = {"key_scale": 0.5, "value_scale": 1.5, "window": 30, "soft_cap": 1.0}
    yield "fp8 with a window", ([90], [4]), {"cache_dtype": FP8}, 1, how


def host_cases():
    """1,500 keys are cut into parts where there are more threads than key heads."""
    for heads in ((1, 1), (8, 2)):
        options = {"heads": heads, "head_size": 48, "block_size": 32}
        for dtype in HOST_ERRORS:
            batch = ([1500, 3, 65], [5, 5, 2])
            yield "long and short contexts", batch, {**options, "dtype": dtype}, 1, {}
        sinks = 3 * torch.linspace(-1, 1, heads[0])
        for window, scores, is_block in itertools.product(
            (None, 1, 2, 3, 31, 70, 1000, 5000), ({}, {"soft_cap": 3.0}, {"sinks": sinks}),
            (False, True),
        ):  # fmt: skip
            own, how = {**options, "is_block": is_block}, {"window": window, **scores}
            yield "windows", ([1500, 3, 65, 0], [6] * 4), own, 1, how
        options["dtype"] = torch.bfloat16  # also packed
        for window in (2, 31, 70, None):
            yield "windows", ([1500, 3, 65, 0], [6] * 4), options, 1, {"window": window}


CASES = [
    pytest.param(*rest, id=f"{name}-{at}", marks=[pytest.mark.sharded] * name.endswith("Z"))
    for at, (name, *rest) in enumerate([*cases(), *(device_cases if INTERPRETED else host_cases)()])
]


@pytest.mark.parametrize(("requests", "options", "processors", "how"), CASES)
def test_as_plain_attention(requests, options, processors, how):
    check(Batch(*requests, **options), processors, **how)


@pytest.mark.parametrize(("uneven", "processors"), chessboard([False, True], [1, 110]))
def test_trees_of_all_sizes_in_one_batch(processors, uneven):
    """Requests without rows, and rows without requests, are left alone."""
    contexts, sizes = [0, 31, 32, 600, 64, 1, 0], [1, 0, 40, 33, 1, 5, 0]
    batch = Batch(contexts, sizes)
    # Nothing of a request without rows may be looked at.
    batch.contexts[1] = 2**30
    batch.table[1] = 2**30
    check(batch, processors, splits=[1 if processors == 1 else 3], uneven=uneven)


@pytest.mark.parametrize(
    ("window", "processors"),
    [*zip([1, 4, 16, 33, 64, 130, 300, 5000, 2**40], [*[110, 1] * 4, 110], strict=True)],
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
    for found in attended(batch):
        assert torch.equal(found[:nodes, 0], expected)


HOW = [{}, {"window": 20}, *([{"continued": True}] if INTERPRETED else [{"window": 3}])]


HOW += [{"chunk": 16}] * INTERPRETED


@pytest.mark.parametrize(("how", "place"), chessboard(HOW, [(0, 1), (32, 110)]))
def test_each_request_has_a_tree_of_its_own(place, how):
    first_node, processors = place
    batch = Batch([600, 31, 5, 0], [33, 7, 0, 20], heads=(4, 2), first_node=first_node)
    batch.give_own_trees()
    check(batch, processors, **how)


def test_a_request_is_attended_as_if_it_were_alone():
    """By a kernel to the bit, if its context is not cut into parts."""
    batch = Batch([70, 2, 33], [6, 6, 4], heads=(4, 2), block_size=32)
    batch.give_own_trees()
    every = [attended(batch), *(attended(batch.only(request)) for request in range(3))]
    for together, *alone in [*zip(*every, strict=True)][:1]:
        rows = torch.cat([found[:size] for found, size in zip(alone, [6, 6, 4], strict=True)])
        assert torch.equal(together[: len(rows)], rows)


def test_large_scores_do_not_overflow():
    """One key outweighs all others by e**300: its value comes out, and no NaN."""
    batch = Batch([60], [1], heads=(1, 1), block_size=32)
    batch.keys[batch.table[0].long()], batch.values[batch.table[0].long()] = 0.0, 0.0
    batch.keys[batch.table[0, 1], 7], batch.values[batch.table[0, 1], 7] = 37.5, 3.0
    batch.query.fill_(1.0)
    for found in attended(batch):
        assert torch.equal(found[0], torch.full_like(found[0], 3.0))


# The interpreter cuts bfloat16 off where it should round.
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * (not INTERPRETED))
def test_values_are_rounded_as_torch_rounds_them(dtype):
    """A single visible key gives its own value back, whatever the value; sums are rounded."""
    batch = Batch([0], [1], heads=(1, 1), dtype=dtype)
    largest = torch.finfo(dtype).max
    special = [0.0, -0.0, 1.0, -largest, largest, float("inf"), 6e-8, -6e-5, 1e-20, 0.1]
    value = batch.values[batch.table[0, 0], 0, 0]
    value[: len(special)] = torch.tensor(special, dtype=dtype)
    for found in attended(batch):
        assert torch.equal(found[0, 0], value.float())
    # Equal scores: the mean of two values, which needs rounding.
    batch = Batch([1], [1], heads=(1, 1), dtype=dtype)
    batch.query.zero_()
    one, other = batch.values[batch.table[0, 0], :2, 0]
    one[:], other[:] = 1.0, torch.linspace(-3, 3, len(other)).to(dtype)
    for found in attended(batch):
        mean = (one.float() + other.float()) / 2
        assert torch.equal(found[0, 0], mean.to(dtype).float())
