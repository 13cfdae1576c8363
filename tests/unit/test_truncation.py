"""Drafts lean into the request's nucleus, by the Q that they are verified against."""

import pytest
import torch
from torch.nn.functional import one_hot

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.v1.verifier import cut
from sequoia_vllm.step.grow import DraftSampling
from sequoia_vllm.step.verify import TargetDistribution
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.sampling import (
    LARGEST_NUCLEUS,
    LOWERED_BY,
    Truncation,
    lower_outside,
)
from tests.oracles.laws import assert_draws, assert_same_law
from tests.support.tree_problems import rows_at, verify_tree
from tests.support.truncations import TRUNCATIONS


def rows_of(count: int, **values: float) -> Truncation:
    def row(name: str, value: float) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int32 if name == "top_k" else torch.float32)

    return Truncation(**{name: row(name, value) for name, value in values.items()})


def lowered(scaled: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Which tokens are: all others are the same bits."""
    found = lower_outside(scaled, truncation)
    is_lowered = found != scaled
    assert torch.equal(found[is_lowered], (scaled - LOWERED_BY)[is_lowered])
    return is_lowered


@pytest.mark.parametrize("vocabulary", [50, 5000])
@pytest.mark.parametrize("values", TRUNCATIONS, ids=str)
def test_the_draft_is_cut_where_vllm_would_cut_the_target(values, vocabulary):
    rows = 64
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    temperature = torch.linspace(0.3, 1.1, rows)
    truncation = rows_of(rows, **values)
    everyone = torch.arange(rows)
    target = TargetDistribution(logits, temperature, truncation, cut)
    excluded = target.process(everyone, everyone) == float("-inf")
    found = lowered(logits / temperature[:, None], truncation)
    assert excluded.any(dim=1).all()
    assert torch.equal(found, excluded)


def test_a_row_without_parameters_keeps_its_bits_among_others():
    scaled = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    assert lower_outside(scaled, Truncation()) is scaled  # nothing is copied
    truncation = Truncation(
        top_k=torch.tensor([1000, 10, 1000, 1000]),
        top_p=torch.tensor([1.0, 1.0, 0.5, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.3]),
    )
    assert lowered(scaled, truncation).any(dim=1).tolist() == [False, True, True, True]
    assert lowered(scaled, truncation)[1].sum() == 990


def test_equal_tokens_are_all_inside_or_none_and_excluded_ones_stay_so():
    scaled = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert lowered(scaled, rows_of(1, top_k=2)).tolist() == [[True, False, False, False, True]]
    excluded = torch.tensor([[0.0, float("-inf"), -1.0, float("-inf")]])
    assert torch.equal(lower_outside(excluded, rows_of(1, top_k=3)), excluded)


@pytest.mark.parametrize("size", [LARGEST_NUCLEUS, LARGEST_NUCLEUS + 1])
def test_a_nucleus_too_large_to_look_for_leaves_the_row_alone(size):
    scaled = torch.randn(1, 2000, generator=torch.Generator().manual_seed(2))
    kept = lowered(scaled, rows_of(1, top_k=size)).logical_not().sum()
    assert kept == (size if size == LARGEST_NUCLEUS else 2000)


TARGET = torch.tensor([3.0, 2.5, 2.0, 0.5, 0.0, -1.0])
DRAFT = torch.tensor([2.0, 0.0, 2.5, 1.5, 1.0, -1.0])
TREE = TokenTree((-1, 0, 0, 0))
REQUESTS = 40_000
TOP_P = 0.75
NOTHING = torch.tensor([[-1]])


def started(tree: TokenTree, sampling: DraftSampling):
    """A sampling that drafts one level of children, and this level."""
    [level] = TreeTables(tree, torch.device("cpu")).levels.levels
    sampling.start(tree, len(DRAFT))
    return sampling, level


def drafted(told: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Trees of many requests, ``[REQUESTS, 4]``, and the Q that is kept for each.

    Their texts say that this token comes next.
    """
    torch.manual_seed(0)
    requests = torch.ones(REQUESTS)
    truncation = rows_of(REQUESTS, top_p=TOP_P)
    sampling, level = started(
        TREE, DraftSampling(requests, torch.zeros(REQUESTS, 1), requests == 0, truncation)
    )
    tokens = torch.zeros(REQUESTS, TREE.size, dtype=torch.int64)
    tokens[:, level.columns.flatten().long()] = sampling.children(
        DRAFT.expand(REQUESTS, -1), level, torch.full((REQUESTS, 1), told)
    )[:, 0]
    trees = sampling.finish(tokens)
    return trees.tokens, trees.probs[trees.probs_rows[:, 0]]


def first_tokens(draft: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """How often each token is emitted first, by this Q."""
    scaled = TARGET.expand(REQUESTS, -1)
    everyone = torch.arange(REQUESTS)
    truncation = rows_of(REQUESTS, top_p=TOP_P)
    target = TargetDistribution(scaled, torch.ones(REQUESTS), truncation, cut)
    p = target.probabilities(everyone, everyone)[:, None].expand(-1, TREE.size, -1)
    q = draft[:, None].expand(-1, TREE.size, -1)
    generator = torch.Generator().manual_seed(1)
    parents = torch.tensor(TREE.parents).expand(REQUESTS, -1)
    emitted = verify_tree(p, q, tokens, parents, generator).output_tokens[:, 0]
    return one_hot(emitted, len(TARGET)).sum(dim=0)


@pytest.mark.parametrize("told", [-1, 3])
def test_children_are_drawn_from_the_q_that_is_kept(told):
    tokens, kept = drafted(told)
    assert (kept == kept[0]).all()
    assert kept[0, 1] < 0.02 < rows_at(DRAFT[None], 1.0)[0, 1]  # lowered
    assert_draws(tokens[:, 1:], kept[0].double().numpy())


@pytest.mark.parametrize("told", [-1, 0, 3])
def test_verified_by_that_q_the_law_is_the_targets_and_by_another_it_is_not(told):
    """A verifier that took Q without the truncation, or what is told, would be found out."""
    tokens, kept = drafted(told)
    law = torch.softmax(TARGET, dim=0).double()
    law[torch.softmax(TARGET, dim=0) < law[1]] = 0  # two tokens hold more than TOP_P
    law /= law.sum()
    assert law.count_nonzero() == 2
    assert_same_law(first_tokens(kept, tokens).numpy(), law.numpy())
    plain = rows_at(DRAFT.expand(REQUESTS, -1), 1.0)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_same_law(first_tokens(plain, tokens).numpy(), law.numpy())


def test_a_seeded_request_looks_outside_the_nucleus_last():
    """Its own token is from the nucleus, whatever the noise."""
    requests = 2000
    seeded, seeds = torch.ones(requests, dtype=torch.bool), torch.arange(requests)[:, None]
    truncation = rows_of(requests, top_k=2)
    sampling, level = started(
        TokenTree((-1, 0)), DraftSampling(torch.ones(requests), seeds, seeded, truncation)
    )
    drawn = sampling.children(DRAFT.expand(requests, -1), level, NOTHING.expand(requests, 1))
    expected = torch.softmax(lower_outside(DRAFT[None], rows_of(1, top_k=2)), dim=1)[0]
    counts = one_hot(drawn.flatten(), len(DRAFT)).sum(dim=0)
    assert_same_law(counts.numpy(), expected.double().numpy())


def test_greedy_requests_draft_as_without_parameters():
    greedy = torch.zeros(1), torch.zeros(1, 1), torch.tensor([False]), rows_of(1, top_k=1)
    sampling, level = started(TREE, DraftSampling(*greedy))
    assert sampling.children(DRAFT[None], level, NOTHING).flatten().tolist() == [2, 0, 3]
