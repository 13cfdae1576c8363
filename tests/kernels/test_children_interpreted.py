"""Drawing children, run by Triton's interpreter, against slow references and exact laws."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sequoia_vllm.drafting import drafted_trees
from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels import children_kernels
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED, SKIP
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.retrieval import TOLD_SHARE
from tests.oracles.laws import assert_draws, assert_same_law
from tests.support.chessboard import chessboard
from tests.support.drawing import (
    TINY,
    UNTOUCHED,
    draft_distribution,
    draw,
    greedy_reference,
    sampled_reference,
)

assert_law = partial(assert_same_law, fewest=8)

# -- each mode against its reference -----------------------------------------------------


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("dtype", "vocabulary"), chessboard(DTYPES, [1, 5, 1024, 2500]))
def test_greedy_takes_the_largest_in_order(dtype, vocabulary):
    torch.manual_seed(0)
    counts = [min(count, vocabulary) for count in (3, 1, 7)]
    # Few different values: ties everywhere, within blocks and between them.
    logits = torch.randint(-4, 1, (2 * 3, vocabulary)).to(dtype)
    logits[logits == -3] = -0.0
    logits[logits == -4] = -torch.inf
    drawn = draw(logits, GREEDY, counts, temperature=0.0)
    for request, place in itertools.product(range(2), range(3)):
        expected = greedy_reference(logits[3 * request + place], counts[place])
        assert drawn.children(request, place) == expected
    assert (drawn.tokens[:, [0, -1]] == UNTOUCHED).all()


def test_greedy_takes_all_of_a_vocabulary_of_lost_tokens():
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 4] = -1e30
    assert draw(logits, GREEDY, [6]).children(0, 0) == [4, 0, 1, 2, 3, 5]


@pytest.mark.parametrize(("dtype", "vocabulary"), chessboard(DTYPES[:2], [40, 2500]))
def test_sampled_is_the_race_of_the_reference(dtype, vocabulary):
    torch.manual_seed(1)
    counts, depth = [5, 1, 33], 3
    logits = (torch.randn(3 * 3, vocabulary) * 2).to(dtype)
    temperature = torch.tensor([1.0, 0.3, 1.7])
    seeds = torch.tensor([5, -(2**62), 2**40])
    positions = torch.tensor([0, 77, 100_000], dtype=torch.int32)
    nodes = torch.tensor([2, 9, 11], dtype=torch.int32)
    drawn = draw(
        logits, SAMPLED, counts,
        temperature=temperature, seeds=seeds, positions=positions, nodes=nodes, depth=depth,
    )  # fmt: skip
    for request, place in itertools.product(range(3), range(3)):
        expected = sampled_reference(
            logits[3 * request + place], temperature[request], int(seeds[request]),
            int(positions[request]) + depth, int(nodes[place]), counts[place],
        )  # fmt: skip
        assert drawn.children(request, place) == expected


def test_matched_nodes_of_a_depth_share_their_noise():
    """All but the node's index decides the noise: equal logits, equal children."""
    torch.manual_seed(2)
    row = torch.randn(1, 300)
    drawn = draw(row.expand(4, -1).contiguous(), SEEDED, [6, 6], seeds=torch.tensor([8, 9]))
    assert drawn.children(0, 0) == drawn.children(0, 1)
    assert drawn.children(1, 0) == drawn.children(1, 1)
    assert drawn.children(0, 0) != drawn.children(1, 0)
    deeper = draw(row, SEEDED, [6], seeds=torch.tensor([8]), depth=3)
    assert deeper.children(0, 0) != drawn.children(0, 0)


def test_skip_writes_zeros_and_keeps_nothing():
    torch.manual_seed(3)
    drawn = draw(torch.randn(2 * 2, 30), [SKIP, GREEDY], [2, 3], state_rows=[0, 0])
    assert drawn.tokens[0].tolist() == [UNTOUCHED, 0, 0, 0, 0, 0, UNTOUCHED]
    assert len(set(drawn.children(1, 1))) == 3
    assert (drawn.draft_logits == UNTOUCHED).all()


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED, SEEDED])
def test_garbage_rows_still_give_different_tokens(mode):
    """Padding rows may hold such: an id outside the vocabulary would be read out of bounds."""
    torch.manual_seed(4)
    logits = torch.randn(5, 1100)
    logits[0] = torch.nan
    logits[1, ::2] = torch.nan
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1050:] = torch.nan
    drawn = draw(logits, mode, [9])
    for request in range(5):
        tokens = drawn.children(request, 0)
        assert len(set(tokens)) == 9
        assert all(0 <= token < 1100 for token in tokens)


# -- independence ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED, SEEDED])
def test_a_request_does_not_depend_on_its_neighbours(mode):
    torch.manual_seed(5)
    logits = torch.randn(4 * 2, 1500)
    seeds, positions = torch.tensor([3, 1, 4, 1]), torch.tensor([9, 8, 7, 6], dtype=torch.int32)
    modes = torch.tensor([SAMPLED, mode, SKIP, SEEDED])
    together = draw(logits, modes, [4, 2], seeds=seeds, positions=positions)
    alone = draw(logits[2:4], mode, [4, 2], seeds=seeds[1:2], positions=positions[1:2])
    assert torch.equal(together.tokens[1], alone.tokens[0])


def test_cutting_the_vocabulary_otherwise_changes_nothing(monkeypatch):
    torch.manual_seed(6)
    logits = torch.randn(3 * 2, 1000)
    modes = torch.tensor([GREEDY, SAMPLED, SEEDED])
    whole = draw(logits, modes, [4, 8])
    monkeypatch.setattr(drafted_trees, "_MIN_BLOCK", 64)
    assert torch.equal(draw(logits, modes, [4, 8]).tokens, whole.tokens)


# -- the law of what is sampled ----------------------------------------------------------


def test_children_have_the_law_of_draws_without_replacement(monkeypatch):
    monkeypatch.setattr(drafted_trees, "_MIN_BLOCK", 8)  # interpreted blocks cost what they hold
    draft = np.array([0.45, 0.25, 0.15, 0.1, 0.05])
    requests, width, count = 75, 4, 3
    temperature = 0.7
    logits = torch.from_numpy(np.log(draft) * temperature).float() + 3.0
    seeds = torch.arange(requests) * 977 + 5
    drawn = draw(
        logits.expand(requests * width, -1).contiguous(), SAMPLED, [count] * width,
        temperature=temperature, seeds=seeds,
        positions=torch.zeros(requests, dtype=torch.int32),
    )  # fmt: skip
    chosen = drawn.tokens[:, 1:-1].reshape(-1, count)
    assert_draws(chosen, draft, fewest=8)
    # Two nodes of a request, and two requests: their first children are independent.
    first = chosen[:, 0].reshape(requests, width)
    for one, other in (
        (first[:, 0], first[:, 1]),
        (first[:, 2], first[:, 3]),
        (first[:-1, 0], first[1:, 0]),
    ):
        pairs = torch.bincount(one * 5 + other, minlength=25)
        assert_law(pairs, np.outer(draft, draft).ravel())


@triton.jit
def race_kernel(probabilities, seed, out, rows: tl.constexpr, tokens: tl.constexpr):
    position = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    token = tl.arange(0, tokens)[None, :]
    probability = tl.load(probabilities + token)
    scores = children_kernels.race_scores(probability, tl.load(seed), token, position, 6)
    tl.store(out + position * tokens + token, scores)


def run_race(probabilities, races):
    out = torch.empty(races, len(probabilities))
    probabilities = torch.tensor(probabilities)
    rows = 4096
    race_kernel[(races // rows,)](
        probabilities, torch.tensor([11]), out, rows=rows, tokens=len(probabilities)
    )
    return out.argsort(dim=1, descending=True)


def test_law_of_many_races():
    draft = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.0078125]
    winners = run_race(draft, 1 << 18)[:, :2]
    assert_draws(winners, draft, fewest=8)


def test_tokens_without_probability_come_last_in_uniform_order():
    """After a smallest normal probability, too: what Algorithm 2's fallback assumes."""
    order = run_race([0.0, 1.0, 0.0, TINY, 0.0, 0.0, 0.0, 0.0], 1 << 16)
    assert (order[:, 0] == 1).all()
    assert (order[:, 1] == 3).all()
    rest = torch.tensor([0, -1, 1, -1, 2, 3, 4, 5])[order[:, 2:]]
    for one, other in ((0, 1), (1, 2), (4, 5)):
        pairs = torch.bincount(rest[:, one] * 6 + rest[:, other], minlength=36)
        assert_law(pairs, (1 - np.eye(6)).ravel() / 30)


# -- Q ---------------------------------------------------------------------------------


@triton.jit
def probability_kernel(logits, temperature, statistics, out, size: tl.constexpr):
    token = tl.arange(0, size)
    maximum, total = tl.load(statistics), tl.load(statistics + 1)
    draft = children_kernels.draft_probability(
        tl.load(logits + token), tl.load(temperature), maximum, total
    )
    tl.store(out + token, draft)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_gives_back_q(dtype):
    torch.manual_seed(7)
    vocabulary, temperature = 2048, torch.tensor([0.6, 1.3])
    logits = (torch.randn(2 * 2, vocabulary) * 4).to(dtype)
    logits[1, 1000:] = -torch.inf  # the second block has no finite logit
    drawn = draw(
        logits, SAMPLED, [2, 3], temperature=temperature, state_rows=[2, 0], inner_rows=[2, 0]
    )
    for request, place in itertools.product(range(2), range(2)):
        row = logits[2 * request + place]
        state_row, inner_row = (2, 0)[request], (2, 0)[place]
        assert torch.equal(drawn.draft_logits[state_row, inner_row, :vocabulary], row)
        assert (drawn.draft_logits[state_row, inner_row, vocabulary:] == UNTOUCHED).all()
        draft = torch.empty(vocabulary)
        probability_kernel[(1,)](
            row, temperature[request : request + 1], drawn.draft_stats[state_row, inner_row],
            draft, size=vocabulary,
        )  # fmt: skip
        expected = draft_distribution(row, temperature[request])
        # Two roundings of scaled logits up to 25: 25 * 2**-23 in the exponent.
        torch.testing.assert_close(draft, expected, rtol=1e-5, atol=0)
    assert (drawn.draft_logits[1] == UNTOUCHED).all()
    assert (drawn.draft_stats[1] == UNTOUCHED).all()
    assert (drawn.draft_logits[:, 1] == UNTOUCHED).all()


def test_q_has_no_subnormals_and_no_nan():
    logits = torch.tensor([0.0, -80.0, -87.0, -87.5, -95.0, -200.0, -torch.inf, -torch.inf])
    draft = torch.empty(8)
    probability_kernel[(1,)](logits, torch.ones(1), torch.tensor([0.0, 1.0]), draft, size=8)
    assert (draft > 0).tolist() == [True, True, True, False, False, False, False, False]
    lost = torch.full((8,), -torch.inf)
    for row, statistics in (
        (logits, [torch.nan, torch.nan]),
        (logits, [torch.inf, torch.nan]),
        (lost, [-torch.inf, 0.0]),
    ):
        probability_kernel[(1,)](row, torch.ones(1), torch.tensor(statistics), draft, size=8)
        assert (draft == 0).all()


def test_underflowing_tokens_are_drawn_after_the_others(monkeypatch):
    """By the definition of Q, not by their logits: -88 and -300 have equal chances."""
    monkeypatch.setattr(drafted_trees, "_MIN_BLOCK", 8)
    logits = torch.tensor([-300.0, 0.0, -88.0, -1.0, -torch.inf])
    requests = 60
    drawn = draw(logits.expand(requests, -1).contiguous(), SAMPLED, [5])
    orders = drawn.tokens[:, 1:-1]
    assert {tuple(sorted(order)) for order in orders[:, :2].tolist()} == {(1, 3)}
    assert_law(torch.bincount(orders[:, 2], minlength=5), [1 / 3, 0, 1 / 3, 0, 1 / 3])


@pytest.mark.parametrize("state_row", [-1, 2])
def test_requests_without_a_row_keep_nothing(state_row):
    torch.manual_seed(8)
    logits = torch.randn(2, 50)
    drawn = draw(logits, SAMPLED, [3], state_rows=[state_row, 1], num_states=2)
    assert (drawn.around == UNTOUCHED).all()
    assert (drawn.draft_logits[0] == UNTOUCHED).all()
    assert (drawn.draft_stats[0] == UNTOUCHED).all()
    assert torch.equal(drawn.draft_logits[1, 0, :50], logits[1])
    assert drawn.children(0, 0) == draw(logits, SAMPLED, [3]).children(0, 0)


# -- what a text says comes next ---------------------------------------------------------


@pytest.mark.parametrize("mode", [GREEDY, SEEDED])
def test_a_matched_request_tries_the_told_token_first(mode):
    torch.manual_seed(11)
    logits = torch.randn(2, 1500)
    plain = [draw(logits, mode, [6], depth=0).children(request, 0) for request in range(2)]
    told = torch.tensor([[plain[0][3], 5], [1500, 5]])  # the second's is none of the vocabulary
    found = draw(logits, mode, [6], depth=0, told=told)
    first = plain[0][3]
    assert found.children(0, 0) == [first, *(token for token in plain[0] if token != first)]
    assert found.children(1, 0) == plain[1]


@pytest.mark.parametrize(("dtype", "token"), chessboard(DTYPES[:2], [3, 1400]))
def test_q_prefers_the_told_token_and_is_drawn_from_and_kept(dtype, token):
    """A likely and an unlikely one; the others keep their odds."""
    torch.manual_seed(12)
    logits = torch.randn(2, 1500).mul(2).to(dtype)
    logits[:, 1400] = -torch.inf
    temperature = torch.tensor([1.0, 0.4])
    drawn = draw(
        logits, SAMPLED, [5], depth=0, temperature=temperature,
        told=torch.tensor([[token], [token]]),
    )  # fmt: skip
    for request in range(2):
        kept = drawn.draft_logits[request, 0, :1500]
        others = torch.arange(1500) != token
        assert torch.equal(kept[others], logits[request, others])
        q = draft_distribution(kept, temperature[request])
        assert TOLD_SHARE - 0.02 < q[token] < TOLD_SHARE + 0.05
        maximum, total = drawn.draft_stats[request, 0]
        scaled = kept.float() / temperature[request]
        assert float(maximum) == pytest.approx(float(scaled.max()))
        assert float(total) == pytest.approx(float((scaled - maximum).exp().sum()), rel=1e-5)
        expected = sampled_reference(kept, temperature[request], request, request, 3, 5)
        assert drawn.children(request, 0) == expected


def test_below_the_root_it_is_told_of_nodes_with_the_token_told_before():
    torch.manual_seed(13)
    logits, nodes = torch.randn(2, 60), torch.tensor([1, 2], dtype=torch.int32)
    options = {"nodes": nodes, "told": torch.tensor([[9, 50]]), "node_tokens": [0, 8, 9]}
    plain = draw(logits, GREEDY, [3, 3])
    found = draw(logits, GREEDY, [3, 3], depth=1, **options)
    assert found.children(0, 0) == plain.children(0, 0)
    assert found.children(0, 1)[0] == 50
    beyond = draw(logits, GREEDY, [3, 3], depth=2, **options)
    assert beyond.children(0, 1) == plain.children(0, 1)


# -- the call --------------------------------------------------------------------------


def test_wide_branches_strided_rows_and_int32_tokens():
    torch.manual_seed(9)
    wide = torch.randn(2, 400)
    logits = wide[:, :300]
    drawn = draw(logits, GREEDY, [64], tokens_dtype=torch.int32, max_children=64)
    assert drawn.tokens.dtype == torch.int32
    assert drawn.children(1, 0) == greedy_reference(logits[1], 64)


def test_blocks_leave_few_candidates():
    for vocabulary, branch in itertools.product((1, 32_000, 152_064, 262_144), (1, 16, 64)):
        block, blocks = drafted_trees._blocks(vocabulary, branch)
        assert (blocks - 1) * block < vocabulary <= blocks * block
        assert triton.next_power_of_2(blocks) * branch <= drafted_trees._MAX_CANDIDATES
        assert block & (block - 1) == 0
    assert drafted_trees._blocks(512 * 1024, 16) == (1024, 512)
    assert [drafted_trees._merge_warps(count) for count in (513, 4097, 8192)] == [4, 8, 16]


def test_workspace_serves_all_and_never_frees():
    """A CUDA graph that was captured before it grew still writes to the old memory."""
    workspaces = []
    torch.manual_seed(10)
    logits = torch.randn(6, 1500)
    small = draw(logits[:1], SAMPLED, [2], workspaces=workspaces)
    [before] = workspaces
    large = draw(logits, SAMPLED, [2], workspaces=workspaces)
    assert torch.equal(large.tokens[0], small.tokens[0])
    kept, after = workspaces
    assert kept is before
    assert after.data_ptr() != before.data_ptr()
    assert len(after) >= 2 * len(before)
    again = draw(logits, SAMPLED, [2], workspaces=workspaces)
    assert again.children(0, 0) == small.children(0, 0)
    assert workspaces[2:] == []


def test_what_does_not_fit_together_is_refused():
    logits = torch.randn(4, 8)
    with pytest.raises(ValueError, match="9 children of a vocabulary of 8"):
        draw(logits, GREEDY, [9])
    with pytest.raises(ValueError, match="1 requests of 2 nodes, but 3 rows"):
        draw(logits[:3], GREEDY, [2, 2])
    with pytest.raises(ValueError, match="contiguous"):
        draw(logits.T.contiguous().T, GREEDY, [2])
    cpu = torch.device("cpu")
    levels, batch = TreeTables(TokenTree((-1, 0)), cpu).levels, DraftBatch(1, cpu)
    drafted = drafted_trees.DraftedTrees.empty(1, 1, 1, 2, 8, torch.float32, cpu)
    for wrong in (torch.zeros(1, 9), torch.zeros(1, 8).half()):
        with pytest.raises(ValueError, match=r"float32 \[1, 1, 8\] cannot keep"):
            drafted.draw(batch, 1, levels, levels.levels[0], wrong)
    by_slot = replace(levels.levels[0], columns=torch.zeros(2, 9, 1, dtype=torch.int32))
    drafted.draw(batch, 1, levels, by_slot, torch.zeros(1, 8))  # 9 nodes, but one child
