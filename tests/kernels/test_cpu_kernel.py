"""The compiled tree attention kernel against dense float64 attention."""

import logging

import pytest
import torch

from sequoia_vllm import cpp_library
from sequoia_vllm.attention.cpu_kernel import (
    AttentionShape,
    TreeQueries,
    gather_context,
    keys_and_values,
    load_kernels,
)
from sequoia_vllm.attention.tree_attention import tree_attention, tree_attention_mask
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.tree import TokenTree
from tests.oracles.attention import tree_attention_reference

BLOCK = 32


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attend(shape, cache, table, contexts, sizes, ancestors, query, sinks=None):
    batch, queries = query.shape[:2]
    output = torch.full(query.flatten(0, 1).shape, 7.0, dtype=shape.dtype)
    trees = TreeQueries(
        torch.arange(batch * queries).view(batch, queries), table, contexts, sizes,
        ancestors, int((contexts + sizes).max()), only_trees=True,
    )  # fmt: skip
    trees.for_kernel(shape).attend(load_kernels(), query.flatten(0, 1), cache, output, sinks)
    return output.view_as(query)


def plain(shape, cache, table, contexts, ancestors, query, sinks=None):
    """The reference's attention of whole trees; query ``[requests, nodes, heads, head_size]``."""
    requests, nodes = query.shape[:2]
    keys, values = (part.transpose(1, 2).nan_to_num() for part in keys_and_values(cache))
    return tree_attention_reference(
        query.flatten(0, 1), keys, values, table, contexts.tolist(),
        range(0, (requests + 1) * nodes, nodes), ancestors, 0, shape.scale,
        window=shape.window, soft_cap=shape.soft_cap, sinks=sinks,
    ).view_as(query)  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(1, 1), (8, 2)])
def test_long_and_short_contexts_in_one_batch(dtype, heads, threads):
    """1,500 keys are cut into parts where there are more threads than key heads."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    shape = AttentionShape(*heads, 48, BLOCK, 48**-0.5, dtype)
    contexts, sizes = torch.tensor([1500, 3, 65]), torch.tensor([5, 5, 2])
    table = torch.randperm(150, generator=generator).view(3, 50).to(torch.int32)
    cache = torch.randn(150, heads[1], BLOCK, 96, generator=generator).to(dtype)
    query = torch.randn(3, 5, heads[0], 48, generator=generator).to(dtype)
    ancestors = torch.eye(5, dtype=torch.bool)
    ancestors[:, 0] = True
    found = attend(shape, cache, table, contexts, sizes, ancestors, query)
    expected = plain(shape, cache, table, contexts, ancestors, query)
    for row, size in enumerate(sizes.tolist()):
        error = (found[row, :size].float() - expected[row, :size]).abs().max()
        assert error < {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("heads", [(1, 1), (8, 2)])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 31, 70, 1000, 5000])
@pytest.mark.parametrize(("soft_cap", "sunk"), [(0.0, False), (3.0, False), (0.0, True)])
@pytest.mark.parametrize("is_block", [False, True])
def test_windows_soft_caps_and_sinks(heads, window, soft_cap, sunk, is_block):
    """By hand: what the compiled kernel and the one in torch give is the dense reference's."""
    generator = torch.Generator().manual_seed(window or 0)
    shape = AttentionShape(*heads, 48, BLOCK, 0.5, torch.float32, window, soft_cap)
    contexts, sizes = torch.tensor([1500, 3, 65, 0]), torch.tensor([6, 6, 6, 6])
    table = torch.randperm(200, generator=generator).view(4, 50).to(torch.int32)
    cache = torch.randn(200, heads[1], BLOCK, 96, generator=generator)
    query = torch.randn(4, 6, heads[0], 48, generator=generator)
    sinks = torch.randn(heads[0], generator=generator) * 3 if sunk else None
    ancestors = TreeTables(TokenTree((-1, 0, 0, 1, 3, 4)), torch.device("cpu")).ancestors
    if is_block:
        ancestors = torch.ones_like(ancestors)
    # Nobody need have written what lies before every window, or after the tree.
    places = torch.arange(50 * BLOCK)
    for row, context in zip(table.long(), contexts.tolist(), strict=True):
        first = 0 if window is None else max(0, context - window + 1)
        unwritten = places[(places < first) | (places >= context + 6)]
        for part in keys_and_values(cache):
            part.transpose(1, 2)[row[unwritten // BLOCK], unwritten % BLOCK] = float("nan")
    found = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        found.append(attend(shape, cache, table, contexts, sizes, ancestors, query, sinks))
    keys, values = gather_context(cache, table)
    mask = tree_attention_mask(contexts, ancestors, keys.shape[2], torch.float32, window)
    in_torch = tree_attention(
        query, keys.nan_to_num(), values.nan_to_num(), mask, 0.5, soft_cap, sinks
    )
    expected = plain(shape, cache, table, contexts, ancestors, query, sinks)
    for by_threads in found:
        torch.testing.assert_close(by_threads, expected, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(in_torch, expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 40])
def test_each_request_has_its_own_tree(window):
    """A batch of different trees, with and without windows, is each tree alone."""
    generator = torch.Generator().manual_seed(3)
    shape = AttentionShape(4, 2, 16, BLOCK, 0.5, torch.float32, window)
    trees = [(-1, 0, 1, 2, 3, 4), (-1, 0, 0, 1, 2, 2), (-1, 0, 0, 0, 3, 4)]
    masks = torch.stack([
        TreeTables(TokenTree(parents), torch.device("cpu")).ancestors for parents in trees
    ])  # fmt: skip
    contexts, sizes = torch.tensor([70, 2, 33]), torch.tensor([6, 6, 4])
    table = torch.randperm(12, generator=generator).view(3, 4).to(torch.int32)
    cache = torch.randn(12, 2, BLOCK, 32, generator=generator)
    query = torch.randn(3, 6, 4, 16, generator=generator)
    together = attend(shape, cache, table, contexts, sizes, masks, query)
    keys, values = gather_context(cache, table)
    mask = tree_attention_mask(contexts, masks, keys.shape[2], torch.float32, window)
    in_torch = tree_attention(query, keys, values, mask, 0.5)
    for row in range(3):
        one = slice(row, row + 1)
        alone = attend(
            shape, cache, table[one], contexts[one], sizes[one], masks[row], query[one]
        )  # fmt: skip
        assert torch.equal(together[one], alone)
        nodes = int(sizes[row])
        torch.testing.assert_close(
            in_torch[row, :nodes], alone[0, :nodes], atol=5e-6, rtol=1e-5
        )  # fmt: skip
    assert not torch.allclose(
        together[1:2], attend(shape, cache, table[1:2], contexts[1:2], sizes[1:2], masks[0],
                              query[1:2])
    )  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("parts", [slice(2), slice(1, 2)])  # keys and values, or values alone
@pytest.mark.parametrize(("dtype", "window", "soft_cap"), [
    (torch.float32, None, 0.0), (torch.bfloat16, 40, 0.0), (torch.float16, None, 3.0),
])  # fmt: skip
def test_what_is_not_finite_reaches_only_the_nodes_that_see_it(
    value, parts, dtype, window, soft_cap
):
    """By the compiled kernel and in torch. All rows but those are the same to the bit."""
    generator = torch.Generator().manual_seed(5)
    shape = AttentionShape(4, 2, 16, BLOCK, 0.5, dtype, window, soft_cap)
    contexts, sizes, spoilt = torch.tensor([70, 2]), torch.tensor([6, 5]), 2
    ancestors = TreeTables(TokenTree((-1, 0, 0, 1, 2, 2)), torch.device("cpu")).ancestors
    table = torch.randperm(8, generator=generator).view(2, 4).to(torch.int32)
    cache = torch.randn(8, 2, BLOCK, 32, generator=generator).to(dtype)
    query = torch.randn(2, 6, 4, 16, generator=generator).to(dtype)
    found = []
    for written in (0.0, value):
        for part in keys_and_values(cache)[parts]:
            part[table[0, 2], :, 70 + spoilt - 2 * BLOCK, 3] = written
        trees = TreeQueries(
            torch.arange(12).view(2, 6), table, contexts, sizes, ancestors, 76, only_trees=True
        )
        output = torch.zeros(12, 4, 16, dtype=dtype)
        trees.for_kernel(shape).attend(load_kernels(), query.flatten(0, 1), cache, output)
        assert trees.spoilt.item() == (written != 0)
        keys, values = gather_context(cache, table)
        mask = tree_attention_mask(contexts, ancestors, keys.shape[2], dtype, window)
        in_torch = tree_attention(query, keys, values, mask, 0.5, soft_cap)
        found.append((output.view_as(query), in_torch))
    is_apart = torch.ones(2, 6, dtype=torch.bool)
    is_apart[0] = ~ancestors[:, spoilt]
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(after[is_apart], before[is_apart], atol=5e-3, rtol=1e-2)
        assert not after[~is_apart].isfinite().all(dim=-1).any()
    assert torch.equal(found[0][0][is_apart], found[1][0][is_apart])


def test_large_scores_do_not_overflow():
    """One key outweighs all others by e**300: its value comes out, and no NaN."""
    shape = AttentionShape(1, 1, 16, BLOCK, 1.0, torch.float32)
    cache = torch.zeros(2, 1, BLOCK, 32)
    keys, values = keys_and_values(cache)
    keys[1, 0, 7], values[1, 0, 7] = 75.0, 3.0
    query = torch.full((1, 1, 1, 16), 0.25)
    found = attend(
        shape, cache, torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([60]),
        torch.tensor([1]), torch.ones(1, 1, dtype=torch.bool), query,
    )  # fmt: skip
    assert torch.equal(found, torch.full_like(found, 3.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_as_torch_rounds_them(dtype):
    """A single visible key gives its own value back, whatever the value; sums are rounded."""
    shape = AttentionShape(1, 1, 16, BLOCK, 1.0, dtype)
    cache = torch.zeros(1, 1, BLOCK, 32, dtype=dtype)
    largest = torch.finfo(dtype).max
    special = [0.0, -0.0, 1.0, -largest, largest, float("inf"), 6e-8, -6e-5, 1e-20, 0.1]
    _, values = keys_and_values(cache)
    values[0, 0, 0, : len(special)] = torch.tensor(special, dtype=dtype)
    table, query = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 16, dtype=dtype)
    visible = torch.ones(1, 1, dtype=torch.bool)
    found = attend(
        shape, cache, table, torch.tensor([0]), torch.tensor([1]), visible, query
    ).flatten()
    assert torch.equal(found, values[0, 0, 0])
    # Equal scores: the mean of two values, which needs rounding.
    values[0, 0, 0], values[0, 0, 1] = 1.0, torch.linspace(-3, 3, 16).to(dtype)
    found = attend(
        shape, cache, table, torch.tensor([1]), torch.tensor([1]), visible, query
    ).flatten()
    mean = (values[0, 0, 0].float() + values[0, 0, 1].float()) / 2
    assert torch.equal(found, mean.to(dtype))


def test_padding_rows_are_not_written():
    shape = AttentionShape(2, 1, 16, BLOCK, 1.0, torch.float32)
    output = torch.full((3, 32), 7.0)
    trees = TreeQueries(
        torch.tensor([[2, -1]]), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4]),
        torch.tensor([1]), torch.ones(2, 1, dtype=torch.bool), 5, only_trees=True,
    )  # fmt: skip
    trees.for_kernel(shape).attend(
        load_kernels(), torch.randn(3, 32), torch.randn(1, 1, BLOCK, 32), output
    )
    assert (output[:2] == 7).all()
    assert (output[2] != 7).all()


def test_without_a_compiler_there_is_no_kernel(monkeypatch, caplog, tmp_path):
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import InvalidCxxCompiler

    def fail(*args, **kwargs):
        raise InvalidCxxCompiler

    monkeypatch.setattr(CppCodeCache, "load", fail)
    monkeypatch.setattr(cpp_library.logger, "propagate", True)
    source = tmp_path / "other.cpp"  # not loaded already
    source.touch()
    with caplog.at_level(logging.WARNING, cpp_library.logger.name):
        assert cpp_library.load_library(source, "It is slower") is None
    assert "It is slower: install a C++ compiler" in caplog.text
