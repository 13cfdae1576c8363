"""Verification is lossless: what is emitted has the target's autoregressive law.

Drafts come from Q(path) and are verified against P(path), both different at
every path. First the reference, in exact fractions over every outcome: equality,
no tolerance. (That the fast verifier takes the same decisions is
test_verifier.py's matter.) Then the fast sampler and verifier together, 200,000
samples per case by chi-square; with fresh seeds a correct implementation would
fail each case once in a million runs.
"""

from itertools import product

import pytest
import torch

from sequoia_vllm.verification.topology import Topology
from sequoia_vllm.verification.walk import walk_tree
from tests.oracles.laws import assert_same_law, autoregressive_law, exact_law
from tests.oracles.verification import children_of
from tests.support.exact_models import KINDS, TREES, depth_of, models
from tests.support.tree_problems import drawn_from, rows_at, verify_tree

SAMPLES = 200_000
CHUNK = 50_000

# -- the reference, exactly ---------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES)
def test_algorithm_2_is_lossless_exactly(tree, kind):
    parents = TREES[tree]
    target, draft = models(kind, vocabulary=3)
    length = depth_of(parents) + 1
    expected = autoregressive_law(target, 3, length)
    assert exact_law(target, draft, parents, 3, length) == expected


# -- the fast path, sampled ---------------------------------------------------------


class Tables:
    """P and Q of every path as tensors; a path is a state, the root's is 0."""

    def __init__(self, kind, vocabulary, length):
        target, draft = models(kind, vocabulary)
        paths = [p for n in range(length) for p in product(range(vocabulary), repeat=n)]
        self.vocabulary = vocabulary
        self.target = torch.zeros(len(paths), vocabulary, dtype=torch.float64)
        self.draft_logits = torch.zeros(len(paths), vocabulary)
        for path in paths:
            state = 0
            for token in path:
                state = self.after(state, token)
            self.target[state] = torch.tensor([float(p) for p in target(path)])
            self.draft_logits[state] = torch.tensor([float(p) for p in draft(path)]).log()

    def after(self, state, token):
        return state * self.vocabulary + token + 1


def draft_trees(tables, parents, temperature, generator):
    states = torch.zeros(CHUNK, len(parents), dtype=torch.int64)
    tokens = torch.zeros_like(states)
    for node, children in enumerate(children_of(parents)):
        if children:
            logits = tables.draft_logits[states[:, node]]
            drawn = drawn_from(logits, len(children), temperature, generator)
            tokens[:, children] = drawn
            states[:, children] = tables.after(states[:, node, None], drawn)
    return tokens, states


def emit(tables, parents, batch, temperature, generator, use_verify_tree):
    """What is emitted for `batch`, the look-ups of as many trees with these parents."""
    tokens, states = draft_trees(tables, parents, temperature, generator)

    def target_at(requests, nodes):
        return tables.target[states[requests, nodes]].float()

    def draft_at(requests, nodes):
        return rows_at(tables.draft_logits[states[requests, nodes]], temperature)

    if use_verify_tree:
        draft = rows_at(tables.draft_logits, temperature)[states]
        return verify_tree(tables.target[states].float(), draft, tokens, batch, generator)
    return walk_tree(target_at, draft_at, tokens, batch, generator)


def extended(tables, emitted, generator):
    """The emitted tokens, continued to full length by sampling the target."""
    states = torch.zeros(CHUNK, dtype=torch.int64)
    cells = torch.zeros(CHUNK, dtype=torch.int64)
    for position in range(emitted.shape[1]):
        sampled = torch.multinomial(tables.target[states], 1, generator=generator)[:, 0]
        token = torch.where(emitted[:, position] < 0, sampled, emitted[:, position])
        cells = cells * tables.vocabulary + token
        states = tables.after(states, token)
    return cells


def joint_law(tables, length):
    """Probability of each sequence of ``length`` tokens, first token most significant."""
    law, states = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for _ in range(length):
        law = (law[:, None] * tables.target[states]).flatten()
        tokens = torch.arange(tables.vocabulary)
        states = tables.after(states[:, None], tokens).flatten()
    return law


def check_by_sampling(kind, parents, vocabulary, temperature=1.0, use_verify_tree=False):
    length = depth_of(parents) + 1
    tables = Tables(kind, vocabulary, length)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(vocabulary**length, dtype=torch.int64)
    accepted = 0
    batch = Topology.from_parents(torch.tensor(parents).expand(CHUNK, -1))
    for _ in range(SAMPLES // CHUNK):
        result = emit(tables, parents, batch, temperature, generator, use_verify_tree)
        cells = extended(tables, result.output_tokens, generator)
        counts += torch.bincount(cells, minlength=len(counts))
        accepted += int(result.num_accepted.sum())
    assert_same_law(counts.numpy(), joint_law(tables, length).numpy())
    return accepted / SAMPLES


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_trees_are_lossless(kind):
    #   0 ─┬─ 1 ─┬─ 2 ── 5
    #      ├─ 3  └─ 4
    #      └─ 6
    accepted = check_by_sampling(kind, [-1, 0, 1, 0, 1, 2, 0], vocabulary=4)
    if kind == "Q = P":  # the first child always: 1, 2, 5 (rounding: not even one in 1e6)
        assert accepted == 3.0
    if kind == "disjoint":  # Q's tokens never; the third child of the root is a uniform one
        assert 0 < accepted < 1.5


@pytest.mark.parametrize("tree", ["single", "chain", "star"])
def test_sampled_shapes_are_lossless(tree):
    check_by_sampling("dense", TREES[tree], vocabulary=5, temperature=0.7, use_verify_tree=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "zeros in Q"])
def test_thirty_two_children_are_lossless(kind):
    check_by_sampling(kind, [-1] + [0] * 32, vocabulary=36)


def test_all_of_the_vocabulary_as_children_always_accepts_one():
    assert check_by_sampling("dense", [-1] + [0] * 6, vocabulary=6) == 1.0
