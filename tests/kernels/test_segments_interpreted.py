"""Prompts beside trees in one launch of tree attention, against plain attention in float64."""

import numpy as np
import pytest
import torch

from sequoia_vllm.kernels.segments import TREE, cut_rows, most_segments, with_chain
from tests.oracles.attention import random_ancestors
from tests.support.attending import Batch
from tests.support.chessboard import chessboard
from tests.v2.launches import counted_launches

NODES = 7
# (context, rows, has a tree): prompts of more rows than a mask has, one token, nothing.
MIXED = [
    (40, 7, True), (300, 3, True), (0, 150, False), (17, 1, False), (290, 70, False), (5, 0, False),
    (64, 32, False),
]  # fmt: skip

CHAIN = 1  # the slot after the tree's


def mixed_batch(requests=MIXED, nodes=NODES, **options):
    """The batch, and its segments: each request has its own mask in the batch."""
    contexts, rows, has_tree = zip(*requests, strict=True)
    batch = Batch(contexts, rows, **options)
    generator = torch.Generator().manual_seed(9)
    tree = random_ancestors(nodes, generator)
    most = batch.ancestors.shape[-1]
    chain = torch.ones(most, most, dtype=torch.bool).tril()
    whole = torch.zeros_like(chain)
    whole[:nodes, :nodes] = tree[:most, :most]
    batch.ancestors = torch.stack([whole if each else chain for each in has_tree])
    return batch, tree, np.array(rows, dtype=np.int32), np.array(has_tree)


def run(batch, tree, rows, has_tree, window=None, uneven=True, **options):
    """Attention of all rows, in as many segments as a CUDA graph for them has."""
    masks = with_chain(tree)
    requests, starts = cut_rows(rows, has_tree, masks.shape[-1])
    most = most_segments(len(rows), len(batch.query), masks.shape[-1])
    empty = most - len(requests)
    assert empty >= 0
    contexts, table = batch.contexts.numpy(), batch.table
    first = (np.cumsum(rows) - rows)[requests]
    whole = batch.contexts, batch.starts, batch.table, batch.slots
    batch.contexts = torch.tensor([*(contexts[requests] + starts - first), *[0] * empty]).int()
    batch.starts = torch.tensor([*starts, *[rows.sum()] * (empty + 1)]).int()
    batch.table = torch.cat([table[requests], table[:1].expand(empty, -1)])
    slots = [TREE if has_tree[request] else CHAIN for request in requests]
    batch.slots = torch.tensor([*slots, *[CHAIN] * empty])
    output = batch.run(
        ancestors=masks, window=window, max_queries=masks.shape[-1], uneven=uneven, **options
    )
    batch.contexts, batch.starts, batch.table, batch.slots = whole
    return output


def check(batch, *cut, processors=1, uneven=True, **how):
    """It is plain attention."""
    output = run(batch, *cut, processors=processors, uneven=uneven, **how)
    torch.testing.assert_close(output, batch.expected(**how), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("heads", "processors"), chessboard([(2, 2), (8, 2)], [1, 64]))
def test_every_row_sees_its_context_and_what_its_request_has_before_it(heads, processors):
    check(*mixed_batch(heads=heads), processors=processors)


SINKS = torch.tensor([0.5, -1, 2, 0])
HOW = [{"window": 20}, {"window": 100}, {"soft_cap": 4.0}, {"sinks": SINKS}]


@pytest.mark.parametrize(("how", "processors"), chessboard(HOW, [1, 64]))
def test_windows_soft_caps_and_sinks(how, processors):
    check(*mixed_batch(), processors=processors, **how)


@pytest.mark.parametrize(
    ("head_size", "cache_dtype", "scales"),
    [(512, None, {}), (64, torch.float8_e4m3fn, {"key_scale": 0.5, "value_scale": 2.0})],
)
def test_large_heads_and_caches_in_fp8(head_size, cache_dtype, scales):
    few, options = MIXED[:3] + MIXED[5:], {"head_size": head_size, "cache_dtype": cache_dtype}
    check(*mixed_batch(few, heads=(2, 1), **options), processors=16, **scales)


def test_trees_of_more_nodes_than_a_segment_has_at_least():
    requests = [(40, 45, True), (300, 45, True), (9, 100, False)]
    batch, *cut = mixed_batch(requests, nodes=45)
    assert with_chain(cut[0]).shape == (2, 45, 45)
    check(batch, *cut)


def test_contexts_are_split_by_the_rows_that_there_are():
    """Not by the rows that each request could have: few requests have so many. Without a plan, as
    in steps that run in no graph."""
    requests = [(700, 2, True), *[(0, 1, False)] * 12]
    with counted_launches() as launches:
        check(*mixed_batch(requests, heads=(1, 1)), processors=8, uneven=False)
    names = {name for _, _, name in launches.counts if name.endswith("_kernel")}
    assert names == {"tree_attention_kernel", "merge_splits_kernel"}
    # Of the workspace each takes as many rows as it could have: here splits must fit it.
    check(*mixed_batch(requests, heads=(1, 1)), processors=4, uneven=False)


def test_one_long_context_among_many_has_the_programs_of_the_launch():
    """Not its share by the number of requests; only its splits are merged."""
    requests = [(2100, 2, True), *[(0, 1, False)] * 12]
    for processors in (8, 64):
        with counted_launches() as launches:
            check(*mixed_batch(requests, heads=(1, 1)), processors=processors)
        names = {name for _, _, name in launches.counts if name.endswith("_kernel")}
        assert names == {"plan_splits_kernel", "tree_attention_kernel", "merge_splits_kernel"}


def test_missing_nodes_of_a_small_tree_see_only_themselves():
    tree, chain = with_chain(torch.ones(2, 2, dtype=torch.bool).tril())
    assert tree[:2, :2].tolist() == [[True, False], [True, True]]
    assert torch.equal(tree[2:], torch.eye(32, dtype=torch.bool)[2:])
    assert torch.equal(chain, torch.ones(32, 32, dtype=torch.bool).tril())
