"""Schedules that leave room for prompts, and what is drafted for, captured, warmed up and kept."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.drafting import draft_plan
from sequoia_vllm.drafting.draft_plan import DraftPlan, inner_nodes, inner_rows
from sequoia_vllm.drafting.dynamic_trees import CHILDREN_ON_GPUS, inner_width
from sequoia_vllm.hardware.budget import (
    beyond_budget,
    drafts_by_batch,
    fit_to_budget,
    rungs,
    warm_up_length,
)
from sequoia_vllm.hardware.graph_sizes import (
    MOST_TOKENS,
    capture_sizes,
    decode_shapes,
    first_beyond,
    mixed_shapes,
)
from sequoia_vllm.tree import TokenTree
from tests.support.reference_trees import trees

#        0
#    1   2   5
#   3 4      6
TREE = TokenTree((-1, 0, 0, 1, 1, 0, 5))
WIDE = TokenTree((-1, *[0] * 30, *range(1, 31), 31))
SCHEDULE = [6] * 4 + [3] * 12 + [0] * 100


def test_rows_follow_the_widest_level_or_the_longest_path():
    plan, chain = DraftPlan(WIDE, [61] * 4, 10_000), TokenTree.chain(5)
    assert [plan.rows_per_request(drafts) for drafts in (61, 30)] == [30, 2]
    assert DraftPlan(chain, [5], 100).rows_per_request(5) == 6
    assert DraftPlan(chain, [5], 100, least_rows=9).rows_per_request(5) == 9
    # A batch that would take too many rows is drafted in part.
    for batch, requests in ((100, 66), (66, 66), (7, 7)):
        plan = DraftPlan(WIDE, [61] * batch, most_rows=2000)
        assert plan.most_requests(61) == plan.graph_sizes(61)[-1] == requests  # of 30 rows each
    assert DraftPlan(WIDE, [61] * 4, most_rows=10).most_requests(61) == 1  # at least
    # Levels of dynamic trees have as many inner nodes as fit: 5 nodes, 2 levels below the root's.
    dynamic = DraftPlan(chain, [5], 100, dynamic=True)
    assert dynamic.widest_level == inner_width(6, 5, CHILDREN_ON_GPUS) == 1
    deep = TokenTree((-1, 0, 0, 0, 0, 0, 1, 6))
    assert DraftPlan(deep, [7], 100, dynamic=True).widest_level == 3
    assert DraftPlan(deep, [7], 100).widest_level == 1


def test_only_what_the_schedule_reaches_is_captured():
    """And fewer drafts, for all batches that may change over to them."""
    frozen = DraftPlan(TREE, SCHEDULE, most_rows=2048)
    assert frozen.drafts == [6, 3]
    assert (frozen.graph_sizes(6), frozen.graph_sizes(3)) == ([1, 2, 3, 4], [6, 8, 12, 16])
    plan = DraftPlan(TREE, SCHEDULE, most_rows=2048, others=[6, 3, 1])
    assert plan.drafts == [6, 3, 1]
    assert plan.graph_sizes(6) == [1, 2, 3, 4]
    assert plan.graph_sizes(3) == plan.graph_sizes(1) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert plan.logits_rows == frozen.logits_rows


def test_trees_that_are_equally_deep_share_the_graphs_that_read():
    plan = DraftPlan(TREE, SCHEDULE, most_rows=2048)
    assert plan.read_sizes == {3: [1, 2, 3, 4, 6, 8, 12, 16]}
    plan = DraftPlan(TREE, [6] * 4 + [1] * 2 + [0] * 100, most_rows=2048)
    assert plan.read_sizes == {3: [1, 2, 3, 4], 2: [6]}


def test_prompts_are_read_in_graphs_for_any_batch():
    plan = DraftPlan(TREE, SCHEDULE, most_rows=2048)
    sizes = plan.ragged_sizes(200)
    assert sizes[:3] == [(4, 64), (16, 64), (64, 64)]
    assert sizes[-4:] == [(4, 512), (16, 512), (64, 512), (200, 512)]
    assert len(sizes) == 15
    assert plan.most_rows_read == 512
    assert plan.ragged_sizes(3) == [(3, rows) for rows in (64, 128, 256, 512)]
    assert DraftPlan(TREE, [6] * 400, most_rows=2048).most_rows_read == 400 * 3
    # None has more rows than a pass.
    assert DraftPlan(TREE, [6], most_rows=60).ragged_sizes(8) == [(4, 60), (8, 60)]
    assert DraftPlan(TREE, [6], most_rows=100).ragged_sizes(4) == [(4, 64), (4, 100)]
    assert DraftPlan(TREE, [0] * 4, most_rows=2048).ragged_sizes(8) == []


def test_logits_are_kept_for_the_largest_product_of_batch_and_nodes():
    plan = DraftPlan(TREE, [6] * 4 + [3] * 12 + [1] * 9, most_rows=2048)
    # 3 nodes with children for 4 requests; 2 for 16; 1 for 25.
    assert plan.logits_rows == 32
    assert plan.most_requests(6) == 4
    assert plan.most_requests(5) == 16  # a limit that a tool sets: as many as can be kept
    assert DraftPlan(TREE, [1] * 7, most_rows=2048).most_requests(5) == 3  # 7 rows, of 2 each
    nothing = DraftPlan(TREE, [0] * 8, most_rows=2048)
    assert (nothing.drafts, nothing.widest_level) == ([], 1)
    assert nothing.logits_rows >= inner_nodes(TREE)


@settings(max_examples=60, deadline=None)
@given(trees(40).filter(lambda tree: tree.size > 1), st.data())
def test_every_batch_has_a_graph_and_fits(tree, data):
    most_rows = data.draw(st.integers(tree.size, 600), "most_rows")
    tiers = data.draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(0, tree.size - 1)), min_size=1, max_size=4
        ).filter(lambda tiers: any(drafts for _, drafts in tiers)),
        "tiers",
    )
    by_batch = list(itertools.chain.from_iterable([drafts] * count for count, drafts in tiers))
    plan = DraftPlan(tree, by_batch, most_rows)
    for batch, drafts in enumerate(by_batch, start=1):
        if drafts == 0:
            continue
        grown = min(batch, plan.most_requests(drafts))
        sizes = plan.graph_sizes(drafts)
        fitting = [size for size in sizes if size >= grown]
        assert fitting
        assert fitting[0] <= max(1.5 * grown, grown + 1) or fitting[0] == sizes[0]
        assert sizes[-1] * plan.rows_per_request(drafts) <= max(
            most_rows, plan.rows_per_request(drafts)
        )
        trimmed = tree.trim(drafts + 1)
        rows = [
            row for row, below in zip(inner_rows(tree), trimmed.children, strict=False) if below
        ]
        assert sizes[-1] * (max(rows) + 1) <= plan.logits_rows


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tile_that_a_tree_near_the_longest_request_may_have_is_warmed_up(group, dtype):
    pytest.importorskip("triton")
    from sequoia_vllm.engine.worker.worker_gpu import warmed_sizes
    from sequoia_vllm.kernels.tree_attention import choose_tile

    for head_size in (64, 128, 256):
        for capability in (80, 89, 90, 120):
            for size in (2, 3, 5, 16, 48, 64):
                tiles = {
                    nodes: choose_tile(nodes * group, head_size, dtype.itemsize, capability)
                    for nodes in range(2, size + 1)
                }
                warmed = warmed_sizes(size, dtype)
                assert {tiles[nodes] for nodes in warmed} == set(tiles.values())
                assert warmed[0] == size == max(warmed)


WHOLE = [(1, 1, 63)]
LIMITS = [(256, 2048), (256, 8192), (1024, 8192), (1024, 16384), (3, 512), (100, 300)]
LIBRARY = [(1, 1, 127), (2, 2, 77), (3, 4, 31), (5, 6, 23), (7, 10, 15), (11, 27, 9), (28, 256, 5)]


def test_larger_batches_draft_prefixes_with_powers_of_two_of_nodes():
    assert fit_to_budget([(1, 1, 15)], 15, 8, 4096) == [(1, 1, 15)]  # whole trees, where they fit
    assert fit_to_budget(WHOLE, 63, 256, 2048) == [
        (1, 16, 63), (17, 32, 31), (33, 64, 15), (65, 128, 7), (129, 256, 3),
    ]  # fmt: skip
    assert fit_to_budget(WHOLE, 63, 1024, 8192)[-2:] == [(129, 256, 3), (257, 1024, 0)]
    assert fit_to_budget([(1, 1, 23)], 23, 8, 256) == [(1, 5, 23), (6, 8, 15)]


@pytest.mark.parametrize(("max_num_seqs", "budget"), LIMITS)
@pytest.mark.parametrize(("schedule", "drafts"), [(WHOLE, 63), (LIBRARY, 127), ([(1, 9, 4)], 4)])
def test_trees_take_at_most_half_of_the_budget(schedule, drafts, max_num_seqs, budget):
    fitting = fit_to_budget(schedule, drafts, max_num_seqs, budget)
    wanted = drafts_by_batch(schedule, drafts, max_num_seqs)
    found = drafts_by_batch(fitting, drafts, max_num_seqs)
    most = min(budget // 2, 1024)
    for batch, (ours, whole) in enumerate(zip(found, wanted, strict=True), start=1):
        if batch * (whole + 1) <= most:
            assert ours == whole
        else:
            assert ours < whole
            assert ours == 0 or batch * (ours + 1) <= most < batch * (whole + 1)
            assert (ours + 1).bit_count() == 1
    assert beyond_budget(fitting, drafts, max_num_seqs, budget) is None
    assert fit_to_budget(fitting, drafts, max_num_seqs, budget) == fitting


def test_steps_that_wait_for_weights_have_room_for_larger_trees():
    """The paper's of 768 nodes: arithmetic counts late there, and the budget alone limits them."""
    schedule = [(1, 1, 767)]
    assert fit_to_budget(schedule, 767, 4, 8192) == [(1, 1, 767), (2, 2, 511), (3, 4, 255)]
    assert fit_to_budget(schedule, 767, 4, 8192, offloaded=True) == schedule
    assert fit_to_budget(schedule, 767, 2, 2048, offloaded=True) == [(1, 1, 767), (2, 2, 511)]


def test_a_context_has_room_for_the_prompt_and_the_steps_that_warm_up():
    assert warm_up_length(64) == (64 + 1) + 64 + 1 + 1


def test_the_first_batch_beyond_the_budget_is_named():
    """32 requests of 64 nodes and a slot for the draft of each."""
    assert beyond_budget(WHOLE, 63, 256, 2048) == (32, 2080)
    assert beyond_budget(WHOLE, 63, 31, 2048) is None
    assert beyond_budget([(1, 8, 63), (9, 256, 0)], 63, 256, 600) is None
    gaps = [(4, 5, 9), (1, 2, 20)]  # read as vLLM reads them
    assert drafts_by_batch(gaps, 15, 7) == [15, 15, 15, 9, 9, 9, 9]


@pytest.mark.parametrize(("max_num_seqs", "budget"), LIMITS)
@pytest.mark.parametrize(("schedule", "drafts"), [(WHOLE, 63), (LIBRARY, 127), ([(1, 9, 0)], 4)])
def test_every_batch_has_a_graph_with_little_padding(schedule, drafts, max_num_seqs, budget):
    fitting = fit_to_budget(schedule, drafts, max_num_seqs, budget)
    tokens = [count + 1 for count in drafts_by_batch(fitting, drafts, max_num_seqs)]
    sizes = capture_sizes(tokens, budget)
    shapes = decode_shapes(tokens, sizes[-1])
    assert sizes == sorted(set(sizes))
    assert sizes[-1] <= min(budget, MOST_TOKENS)
    assert len(sizes) <= 50
    assert len(shapes) <= 130
    for batch, each in enumerate(tokens, start=1):
        assert batch * each <= sizes[-1]
        padded = min(n for t, n in shapes if t == each and n >= batch)
        if each > 1:
            share = 2 if padded > 8 and padded * each <= 128 else 8
            assert padded - batch <= max(batch - 1, 0) / share
        assert (each, max(n for t, n in shapes if t == each and n <= max_num_seqs)) in shapes


def test_where_nothing_is_drafted_graphs_are_vllms():
    found = [requests for _, requests in decode_shapes([1] * 600, 1024)]
    assert found == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), 576, 600]


def test_steps_that_read_prompts_have_graphs_for_few_and_many_requests():
    assert mixed_shapes(1, 1024) == []
    assert mixed_shapes(8, 100) == [(32, 8), (64, 8), (96, 8), (100, 8)]
    found = {}
    for tokens, requests in mixed_shapes(256, 1024):
        found.setdefault(tokens, []).append(requests)
    assert found == {
        32: [8], 64: [8, 32], 96: [8, 32], 128: [8, 32], 192: [8, 32], 256: [8, 32, 128],
        320: [32, 128], 384: [32, 128], 448: [32, 128], 512: [32, 128, 256],
    }  # fmt: skip


def test_graphs_are_captured_for_what_the_schedule_reaches_only():
    """And down to half of a range: requests may finish before drafts follow."""
    tokens = [16] * 4 + [8] * 12
    found = decode_shapes(tokens, 1024)
    assert found == [
        *((1, requests) for requests in (1, 2, 4, 8, 16)),
        *((8, requests) for requests in (3, 4, 5, 6, 7, 8, 12, 16)),
        *((16, requests) for requests in range(1, 5)),
    ]
    assert decode_shapes(tokens, 1024, [17]) == found  # no batch has so many
    # Engines that adapt have graphs for fewer drafts, and beyond their schedule.
    assert set(decode_shapes(tokens, 1024, [16, 8, 4, 2])) - set(found) == {
        *((8, requests) for requests in (1, 2)),
        *((each, requests) for each in (4, 2) for requests in (1, 2, 3, 4, 6, 8, 12, 16)),
    }
    tokens, most = [16] * 4 + [1] * 12, [16] * 8 + [1] * 8
    beyond = set(decode_shapes(tokens, 1024, [16], most))
    assert beyond - set(decode_shapes(tokens, 1024, [16])) == {(16, 6), (16, 8)}


@pytest.mark.parametrize(
    ("scheduled", "found", "between"),
    [
        ([15], [15, 7, 3, 1], [15, 11, 7, 5, 3, 2, 1]),
        ([127, 63, 31, 16, 15, 9, 7, 5, 3, 2, 1, 0], [127, 63, 31, 15, 7, 3, 1], None),
        ([20, 9, 6], [20, 9, 4, 1], None),
        ([12, 7], [12, 7, 3, 1], None),
        ([5, 3, 2, 1], None, [5, 3, 2]),
        ([1, 0], [1], [1]),
        ([0], [], []),
    ],
)
def test_numbers_of_drafts_to_choose_among(scheduled, found, between):
    """And those between, where none needs graphs."""
    assert found is None or rungs(scheduled) == found
    assert between is None or rungs(scheduled, between=True) == between


@given(st.lists(st.integers(0, 300), min_size=1))
def test_each_rung_is_about_half_of_the_one_before(scheduled):
    found = rungs(scheduled)
    assert found[:1] == [max(scheduled)][: len(found)]
    for larger, smaller in itertools.pairwise(found):
        assert 0 < smaller < larger
        assert (larger + 1) / 2 / 1.31 - 1 <= smaller + 1 <= (larger + 1) / 2 * 1.3
    assert found[-1:] in ([], [1], [2])


def test_steps_of_many_tokens_are_not_captured():
    """Batches without graphs are those of large trees."""
    assert decode_shapes([64] * 40, 1024)[-1] == (64, 16)
    assert capture_sizes([64] * 40, 8192)[-1] == 1024
    assert decode_shapes([600, 600], 512) == [(1, 1), (1, 2)]
    assert first_beyond([768, 768, 768], 1024) == 2
    assert first_beyond([768, 512, 256], 1024) is None
    assert first_beyond([64] * 16 + [1] * 2000, 1024) is None  # plain decoding is vLLM's affair


def test_rows_and_widths_of_a_tree():
    #        0 with children 1, 2 and 5; 3 and 4 below 1; 6 below 5
    tree, root = TokenTree((-1, 0, 0, 1, 1, 0, 5)), TokenTree((-1,))
    assert (draft_plan.level_widths(tree), draft_plan.level_widths(root)) == ([1, 2], [0])
    assert (draft_plan.inner_nodes(tree), draft_plan.inner_rows(root)) == (3, [-1])
    assert draft_plan.rows_per_tree(root, [-1]) == 0
    assert draft_plan.depths_by_drafts(tree) == [0, 1, 1, 2, 2, 2, 2]
    assert DraftPlan(tree, [6] * 4, 64).widest_level == 4 * 2
    assert DraftPlan(tree, [0] * 4, 64).widest_level == 1
