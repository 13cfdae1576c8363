"""Schedules that leave room for prompts, and the CUDA graphs that they need."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequoia_vllm.hardware.budget import beyond_budget, drafts_by_batch, fit_to_budget, rungs
from sequoia_vllm.hardware.graph_sizes import (
    MOST_TOKENS,
    capture_sizes,
    decode_shapes,
    first_beyond,
)

WHOLE = [(1, 1, 63)]
LIMITS = [(256, 2048), (256, 8192), (1024, 8192), (1024, 16384), (3, 512), (100, 300)]
LIBRARY = [(1, 1, 127), (2, 2, 77), (3, 4, 31), (5, 6, 23), (7, 10, 15), (11, 27, 9), (28, 256, 5)]


def test_whole_trees_where_they_fit():
    assert fit_to_budget([(1, 1, 15)], 15, 8, 4096) == [(1, 1, 15)]


def test_larger_batches_draft_prefixes_with_powers_of_two_of_nodes():
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


def test_schedules_are_read_as_vllm_reads_them():
    gaps = [(4, 5, 9), (1, 2, 20)]
    assert drafts_by_batch(gaps, 15, 7) == [15, 15, 15, 9, 9, 9, 9]


def test_the_first_batch_beyond_the_budget_is_named():
    """32 requests of 64 nodes and a slot for the draft of each."""
    assert beyond_budget(WHOLE, 63, 256, 2048) == (32, 2080)
    assert beyond_budget(WHOLE, 63, 31, 2048) is None
    assert beyond_budget([(1, 8, 63), (9, 256, 0)], 63, 256, 600) is None


# -- CUDA graphs ------------------------------------------------------------------------------


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


def test_graphs_are_captured_for_what_the_schedule_reaches_only():
    """And down to half of a range: requests may finish before drafts follow."""
    tokens = [16] * 4 + [8] * 12
    assert decode_shapes(tokens, 1024) == [
        *((1, requests) for requests in (1, 2, 4, 8, 16)),
        *((8, requests) for requests in (3, 4, 5, 6, 7, 8, 12, 16)),
        *((16, requests) for requests in range(1, 5)),
    ]


def test_numbers_of_drafts_to_choose_among():
    assert rungs([15]) == [15, 7, 3, 1]
    assert rungs([127, 63, 31, 16, 15, 9, 7, 5, 3, 2, 1, 0]) == [127, 63, 31, 15, 7, 3, 1]
    assert rungs([20, 9, 6]) == [20, 9, 4, 1]
    assert rungs([12, 7]) == [12, 7, 3, 1]
    assert rungs([1, 0]) == [1]
    assert rungs([0]) == []


def test_numbers_between_where_none_needs_graphs():
    assert rungs([15], between=True) == [15, 11, 7, 5, 3, 2, 1]
    assert rungs([5, 3, 2, 1], between=True) == [5, 3, 2]
    assert rungs([1, 0], between=True) == [1]
    assert rungs([0], between=True) == []


@given(st.lists(st.integers(0, 300), min_size=1))
def test_each_rung_is_about_half_of_the_one_before(scheduled):
    found = rungs(scheduled)
    assert found[:1] == [max(scheduled)][: len(found)]
    for larger, smaller in itertools.pairwise(found):
        assert 0 < smaller < larger
        assert (larger + 1) / 2 / 1.31 - 1 <= smaller + 1 <= (larger + 1) / 2 * 1.3
    assert found[-1:] in ([], [1], [2])


def test_engines_that_adapt_have_graphs_for_fewer_drafts():
    tokens = [16] * 4 + [8] * 12
    found = set(decode_shapes(tokens, 1024, [16, 8, 4, 2]))
    assert found - set(decode_shapes(tokens, 1024)) == {
        *((8, requests) for requests in (1, 2)),
        *((each, requests) for each in (4, 2) for requests in (1, 2, 3, 4, 6, 8, 12, 16)),
    }


def test_engines_that_adapt_have_graphs_beyond_their_schedule():
    tokens, most = [16] * 4 + [1] * 12, [16] * 8 + [1] * 8
    found = set(decode_shapes(tokens, 1024, [16], most))
    assert found - set(decode_shapes(tokens, 1024, [16])) == {(16, 6), (16, 8)}


def test_steps_of_many_tokens_are_not_captured():
    assert decode_shapes([64] * 40, 1024)[-1] == (64, 16)
    assert capture_sizes([64] * 40, 8192)[-1] == 1024
    assert decode_shapes([600, 600], 512) == [(1, 1), (1, 2)]


def test_batches_without_graphs_are_those_of_large_trees():
    assert first_beyond([768, 768, 768], 1024) == 2
    assert first_beyond([768, 512, 256], 1024) is None
    assert first_beyond([64] * 16 + [1] * 2000, 1024) is None  # plain decoding is vLLM's affair
