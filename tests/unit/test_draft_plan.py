"""Which batches are drafted for, captured and kept: never more than a pass of the draft takes."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.drafting.draft_plan import (
    DraftPlan,
    depths_by_drafts,
    inner_nodes,
    inner_rows,
    level_widths,
)
from sequoia_vllm.hardware.budget import drafts_by_batch, fit_to_budget
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.tree import TokenTree
from tests.support.reference_trees import trees

#        0
#    1   2   5
#   3 4      6
TREE = TokenTree((-1, 0, 0, 1, 1, 0, 5))
WIDE = TokenTree((-1, *[0] * 30, *range(1, 31), 31))


def test_shapes_of_a_tree():
    assert level_widths(TREE) == [1, 2]
    assert inner_nodes(TREE) == 3
    assert depths_by_drafts(TREE) == [0, 1, 1, 2, 2, 2, 2]
    assert inner_nodes(TokenTree((-1,))) == 0


def test_rows_follow_the_widest_level_or_the_longest_path():
    plan = DraftPlan(WIDE, [61] * 4, 10_000)
    assert plan.rows_per_request(61) == 30
    assert plan.rows_per_request(30) == 2
    assert DraftPlan(TokenTree.chain(5), [5], 100).rows_per_request(5) == 6
    assert DraftPlan(TokenTree.chain(5), [5], 100, least_rows=9).rows_per_request(5) == 9


@pytest.mark.parametrize(("batch", "requests"), [(100, 66), (66, 66), (7, 7)])
def test_a_batch_that_would_take_too_many_rows_is_drafted_in_part(batch, requests):
    plan = DraftPlan(WIDE, [61] * batch, most_rows=2000)
    assert plan.most_requests(61) == requests  # of 30 rows each
    assert plan.graph_sizes(61)[-1] == requests


def test_only_what_the_schedule_reaches_is_captured():
    plan = DraftPlan(TREE, [6] * 4 + [3] * 12 + [0] * 100, most_rows=2048)
    assert plan.drafts == [6, 3]
    assert plan.graph_sizes(6) == [1, 2, 3, 4]
    assert plan.graph_sizes(3) == [6, 8, 12, 16]
    assert plan.graph_sizes(3)[0] >= 5


def test_fewer_drafts_are_captured_for_all_batches_that_may_change_over_to_them():
    plan = DraftPlan(TREE, [6] * 4 + [3] * 12 + [0] * 100, most_rows=2048, others=[6, 3, 1])
    frozen = DraftPlan(TREE, [6] * 4 + [3] * 12 + [0] * 100, most_rows=2048)
    assert plan.drafts == [6, 3, 1]
    assert plan.graph_sizes(6) == [1, 2, 3, 4]
    assert plan.graph_sizes(3) == plan.graph_sizes(1) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert plan.logits_rows == frozen.logits_rows


def test_trees_that_are_equally_deep_share_the_graphs_that_read():
    plan = DraftPlan(TREE, [6] * 4 + [3] * 12 + [0] * 100, most_rows=2048)
    assert plan.read_sizes == {3: [1, 2, 3, 4, 6, 8, 12, 16]}
    plan = DraftPlan(TREE, [6] * 4 + [1] * 2 + [0] * 100, most_rows=2048)
    assert plan.read_sizes == {3: [1, 2, 3, 4], 2: [6]}


def test_prompts_are_read_in_graphs_for_any_batch():
    plan = DraftPlan(TREE, [6] * 4 + [3] * 12 + [0] * 100, most_rows=2048)
    sizes = plan.ragged_sizes(200)
    assert sizes[:3] == [(4, 64), (16, 64), (64, 64)]
    assert sizes[-4:] == [(4, 512), (16, 512), (64, 512), (200, 512)]
    assert len(sizes) == 15
    assert plan.most_rows_read == 512
    assert plan.ragged_sizes(3) == [(3, rows) for rows in (64, 128, 256, 512)]
    many = DraftPlan(TREE, [6] * 400, most_rows=2048)
    assert many.most_rows_read == 400 * 3


def test_no_ragged_graph_has_more_rows_than_a_pass():
    assert DraftPlan(TREE, [6], most_rows=60).ragged_sizes(8) == [(4, 60), (8, 60)]
    assert DraftPlan(TREE, [6], most_rows=100).ragged_sizes(4) == [(4, 64), (4, 100)]
    assert DraftPlan(TREE, [0] * 4, most_rows=2048).ragged_sizes(8) == []


def test_logits_are_kept_for_the_largest_product_of_batch_and_nodes():
    plan = DraftPlan(TREE, [6] * 4 + [3] * 12 + [1] * 9, most_rows=2048)
    # 3 nodes with children for 4 requests; 2 for 16; 1 for 25.
    assert plan.logits_rows == 32
    assert plan.most_requests(6) == 4
    assert plan.most_requests(5) == 16  # a limit that a tool sets: as many as can be kept


def test_a_schedule_that_drafts_nothing_has_a_plan():
    plan = DraftPlan(TREE, [0] * 8, most_rows=2048)
    assert plan.drafts == []
    assert plan.widest_level == 1
    assert plan.logits_rows >= inner_nodes(TREE)


# Sequences and tokens per step of `vllm serve` on small and large GPUs, and of `LLM` there.
SERVER_DEFAULTS = [(256, 2048), (1024, 8192), (1024, 16384)]


@pytest.mark.parametrize(("max_num_seqs", "budget"), SERVER_DEFAULTS)
def test_passes_of_the_librarys_trees_fit_where_nothing_is_set(max_num_seqs, budget):
    """Also where a user's own schedule drafts the whole tree at all loads."""
    library = TreeLibrary(user=Path("none"))
    for entry in library.entries():
        schedule, tree = entry.to_schedule(), library.entry(entry.name).tree
        drafts = tree.num_speculative_tokens
        if drafts == 0:
            continue
        for fitted in (
            fit_to_budget(schedule.ranges, drafts, max_num_seqs, budget),
            [(1, max_num_seqs, drafts)],  # a user's own: the whole tree at all loads
        ):
            by_batch = drafts_by_batch(fitted, drafts, max_num_seqs)
            plan = DraftPlan(tree, by_batch, budget)
            for number in plan.drafts:
                rows = plan.graph_sizes(number)[-1] * plan.rows_per_request(number)
                assert rows <= budget, entry.name
            if fitted[-1][2] != drafts:
                assert plan.logits_rows <= 1024, entry.name


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
