"""The CPU's compiled kernels: broken caches, no compiler; `tests/ops` has their laws."""

import ctypes
import logging

import pytest
import torch

from sequoia_vllm import cpp_library
from sequoia_vllm.attention.cpu_kernel import (
    AttentionShape,
    TreeQueries,
    clear_tokens,
    gather_context,
    keys_and_values,
    load_kernels,
)
from sequoia_vllm.attention.tree_attention import tree_attention, tree_attention_mask
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.tree import TokenTree
from tests.support.builds import attention_for_avx2
from tests.support.caches import stored

BLOCK = 32


def test_it_has_the_vectors_of_its_machine():
    """With twice as wide ones sums do not fit the registers: a tree took 7 to 24 times as long."""
    assert ctypes.c_int64.in_dll(attention_for_avx2(), "sequoia_lanes").value == 8


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("parts", [slice(2), slice(1, 2)])  # keys and values, or values alone
@pytest.mark.parametrize(("dtype", "window", "soft_cap", "packed"), [
    (torch.float32, None, 0.0, False), (torch.bfloat16, 40, 0.0, False),
    (torch.float16, None, 3.0, False), (torch.bfloat16, 40, 0.0, True),
])  # fmt: skip
def test_what_is_not_finite_reaches_only_the_nodes_that_see_it(
    value, parts, dtype, window, soft_cap, packed
):
    """By the compiled kernel and in torch. All rows but those are the same to the bit."""
    generator = torch.Generator().manual_seed(5)
    shape = AttentionShape(4, 2, 16, BLOCK, 0.5, dtype, window, soft_cap, packed)
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
        given = packed_copy(cache) if packed else cache
        trees.for_kernel(shape).attend(load_kernels(), query.flatten(0, 1), given, output)
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


def packed_copy(cache):
    return stored(keys_and_values(cache), cache.shape, packed=True)


@pytest.mark.parametrize("packed", [False, True])
def test_slots_are_cleared(packed):
    cache = torch.randn(3, 2, BLOCK, 32).bfloat16()
    cleared = packed_copy(cache) if packed else cache.clone()
    clear_tokens(cleared, torch.tensor([BLOCK + 5, 2 * BLOCK]), packed)
    for part in keys_and_values(cache):
        part[1, :, 5] = part[2, :, 0] = 0
    assert torch.equal(cleared, packed_copy(cache) if packed else cache)


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
