"""Branches of told tokens grow with what came true, and give way where trees bring more."""

import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sequoia_vllm.adaptation.step_times import pass_seconds
from sequoia_vllm.adaptation.told_branches import DISK, MOST_TOLD, Survival, ToldBranches, longest
from sequoia_vllm.verification.prediction import Prediction


def depth(
    branches: ToldBranches, run: int, credit: int = MOST_TOLD, most: int = MOST_TOLD, **changed
) -> int:
    tree = {"tree_depth": 4, "drafts": 15, "requests": 1, **changed}
    return branches.depth(branches.predictions, run, longest(most, run, credit), **tree)


def test_a_token_is_expected_as_laplace_says():
    """Runs count by powers of two, and from 32 on alike."""
    for run, least in ((0, 0), (1, 1), (3, 2), (4, 4), (31, 16), (32, 32), (90, 32)):
        assert Survival().chances(run, 1) == pytest.approx([(least + 1) / (least + 2)])
    assert Survival().chances(6, 4) == pytest.approx([5 / 6, 25 / 36, 0.625, 0.5625])


def test_each_length_is_counted_by_itself():
    survival = Survival()
    survival.count(2, 3, True)  # after runs of 2, 3 and 4 they came true, after 5 another did
    of_each = [survival.chances(run, 1)[0] for run in (1, 2, 4, 8)]
    assert of_each == pytest.approx([2 / 3, (3 + 2) / 6, (10 / 3 + 1) / 6, 0.9])
    survival.count(1, 1, False)
    assert survival.chances(1, 1) == pytest.approx([(8 / 3 + 1) / 5])


def test_predictions_and_texts_are_counted_apart():
    branches = ToldBranches()
    tree = {"tree_depth": 4, "drafts": 15, "requests": 1}
    assert branches.depth(branches.texts, 16, 32, **tree) == depth(branches, 16) > 4
    for _ in range(200):
        branches.texts.count(16, 0, has_failed=True)
    assert branches.depth(branches.texts, 16, 32, **tree) == 0
    assert depth(branches, 16) > 4


def test_what_is_long_ago_counts_less():
    survival = Survival()
    for _ in range(10_000):
        survival.count(32, 1, False)
    assert survival.chances(32, 1)[0] > 0.995
    for _ in range(300):
        survival.count(32, 0, True)
    assert survival.chances(32, 1)[0] < 0.5


def test_half_of_256_tokens_is_forgotten_at_the_next_one():
    survival = Survival()
    for _ in range(252):
        survival.count(0, 1, False)
    for _ in range(2):
        survival.count(0, 0, True)
    assert survival.chances(0, 1) == pytest.approx([(2 + 252) / 2 / (257 / 2 + 1)])


def test_drafted_trees_bring_the_mean_of_their_steps():
    """And of one node before them. Late steps weigh 2 %."""
    branches = ToldBranches()
    for accepted in (4.0, 1.0, 3.0):
        branches.note_drafted(accepted)
    assert branches._drafted == pytest.approx((1 + 4 + 1 + 3) / 4)
    for _ in range(97):
        branches.note_drafted(2.0)
    before = branches._drafted
    branches.note_drafted(before + 50)
    assert branches._drafted == pytest.approx(before + 1)


@given(st.integers(0, 2**32))
def test_the_branch_that_pays_most_is_found(seed):
    """Against a loop over all lengths. Where the draft has a price, time alone decides."""
    rng = random.Random(seed)
    own = partial(pass_seconds, knee=rng.choice([2.0, 16.0, 200.0]))
    branches = ToldBranches(own, draft := rng.choice([None, 0.0, 0.1, 2.0]))
    branches.note_drafted(rng.uniform(0, 4))
    for _ in range(rng.choice([0, 100])):
        branches.predictions.count(rng.choice([2, 32]), rng.randint(0, 3), has_failed=True)
    run, levels, requests = rng.randint(1, 32), rng.randint(1, 8), rng.choice([1, 2, 16])
    drafts = levels + rng.randint(0, 20)
    chances = branches.predictions.chances(run, MOST_TOLD).tolist()

    def seconds(nodes: int) -> float:
        return float(own(np.array([requests * nodes]))[0])

    tree = 1 + sum(chances[:levels]) + (1 - chances[levels - 1]) * branches._drafted
    best, speed = 0, tree / (seconds(1 + drafts) + (levels - 1) * (draft or 0))
    for length in range(1, min(2 * run, MOST_TOLD) + 1):
        tokens = 1 + sum(chances[:length])
        may = length > levels and tokens > tree if draft is None else True
        if may and tokens / seconds(1 + length) > speed:
            best, speed = length, tokens / seconds(1 + length)
    assert depth(branches, run, tree_depth=levels, drafts=drafts, requests=requests) == best


def test_a_branch_is_at_most_twice_as_long_as_the_match():
    """It has more levels than the tree."""
    branches = ToldBranches(partial(pass_seconds, knee=1000.0))  # rows cost nothing
    assert [depth(branches, run) for run in (0, 1, 2, 3, 4, 8, 16)] == [0, 0, 0, 6, 8, 16, 32]
    assert depth(branches, 32) == MOST_TOLD
    assert [depth(branches, 32, credit=credit) for credit in (2, 3, 8)] == [0, 6, 16]
    assert depth(branches, 8, most=5) == 5
    assert depth(branches, 8, most=4) == depth(branches, 8, tree_depth=16) == 0


def test_rows_have_a_price():
    """More requests share the pass, so each gets less."""
    found = [depth(ToldBranches(), 32, requests=requests) for requests in (1, 2, 4, 16)]
    assert found[0] < MOST_TOLD
    assert found == sorted(found, reverse=True)
    assert len(set(found)) > 2


def test_rows_cost_little_where_weights_come_from_a_disk():
    """One request's branch may be as deep as any; those of many share what rows cost."""
    found = [depth(ToldBranches(DISK), 32, requests=requests) for requests in (1, 4, 16)]
    assert found[0] == MOST_TOLD > found[1] > found[2]
    assert all(depth(ToldBranches(), 32, requests=few) < found[0] for few in (1, 4))


def test_a_slow_draft_gives_way_to_a_short_branch():
    """Where the engine decides how much to draft: else a branch is deeper than the tree."""
    few = partial(pass_seconds, knee=2.0)  # rows are dear
    assert depth(ToldBranches(few), 3, most=3) == 0
    assert 0 < depth(ToldBranches(few, draft=1.0), 3, most=3) <= 3
    assert [ToldBranches(draft=draft).fewest(4) for draft in (None, 0.1)] == [5, 1]


def test_a_tree_stays_where_it_is_expected_to_bring_more():
    branches = ToldBranches()
    assert depth(branches, 4, drafts=4) > 4
    for _ in range(200):
        branches.note_drafted(4.0)
    assert depth(branches, 4, drafts=4) == 0
    assert depth(branches, 32, drafts=4) > 4
    for _ in range(100):
        branches.predictions.count(32, 0, True)
    assert depth(branches, 32, drafts=4) == 0


def steps(text: list[int], written: np.ndarray, tree: int = 4, deep: bool = True) -> int:
    """Steps of one request whose trees have told tokens alone."""
    branches, prediction, done, count = ToldBranches(), Prediction(text), 0, 0
    while done < len(written):
        told = prediction.told(MOST_TOLD)
        most = int((told >= 0).sum()) if deep else 0
        run = prediction.evidence
        length = depth(branches, run, most=most, tree_depth=tree, drafts=tree) or tree
        rest = written[done:][:MOST_TOLD]
        hits = int((told[: len(rest)] == rest)[:length].cumprod().sum())
        branches.predictions.count(run, hits, hits < min(length, most, len(rest)))
        done, count = done + hits + 1, count + 1
        prediction.follow(written[:done])
    return count


def test_a_right_text_takes_few_steps_and_a_wrong_one_none_more():
    text = np.arange(400)
    changed = {number: text.copy() for number in (0, 1, 3, 10)}
    for number, tokens in changed.items():
        tokens[np.linspace(0, 400, number + 2)[1:-1].astype(int)] += 1000
    found = {number: steps(text.tolist(), tokens) for number, tokens in changed.items()}
    assert found == {0: 14, 1: 18, 3: 23, 10: 34}
    shallow = steps(text.tolist(), text, deep=False)
    assert shallow == 80
    other = 1000 + text
    other[::2] = text[::2]  # no two tokens in a row are right
    both = [steps(text.tolist(), other, deep=deep) for deep in (True, False)]
    assert both[0] <= 1.02 * both[1]
