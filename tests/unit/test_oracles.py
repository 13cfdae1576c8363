"""The oracles of `tests.oracles`, and `reference_step`: on any two models the target's law."""

import runpy

import pytest
import torch

from sequoia_vllm import reference_step
from sequoia_vllm.reference_step import begin, step
from tests.oracles.laws import assert_same_law, chi_square
from tests.oracles.random_numbers import philox
from tests.oracles.verification import Uniforms, algorithm_2, children_of
from tests.support.reference_models import EMBEDDED_PARENTS, embedded_model, greedy_tokens


def test_what_is_impossible_and_another_law_are_noticed():
    assert chi_square([99, 1, 0], [100, 0, 0]).p_value == 0.0
    assert chi_square([99, 1], [100, 0]).deviations == float("inf")
    assert chi_square([60, 40, 0], [50, 50, 0]).freedom == 1
    with pytest.raises(AssertionError, match="probability 0 came up"):
        assert_same_law([999, 1], [1.0, 0.0])
    assert_same_law([5050, 4950], [0.5, 0.5])
    with pytest.raises(AssertionError, match=r"chi-square 100\.0 of 2 cells"):
        assert_same_law([5500, 4500], [0.5, 0.5])


def test_a_walk_by_hand():
    """P(a) = 1/4 and Q(a) = 1/2: accepted below 1/2. Else R is (0, 1/3, 2/3), and D (0, 1, 0)."""
    target = {0: [0.25, 0.25, 0.5], 1: [0.0, 0.0, 1.0], 2: [1.0, 0.0, 0.0]}
    draft = [0.5, 0.5, 0.0]
    tokens, children = [0, 0, 1], children_of([-1, 0, 0])
    assert children == [[1, 2], [], []]

    def walk(*values):
        return algorithm_2(target.get, lambda node: draft, tokens, children, Uniforms(values))

    assert walk(0.9, 0.49, 0.0) == ([1], [0, 2])
    assert walk(0.9, 0.51, 0.0) == ([], [2])  # R is (0, 0, 1): the second child is impossible


def test_philox_is_philox():
    """Known answers of the published test vectors (Random123, philox4x32, 10 rounds)."""
    ones = 2**32 - 1
    assert philox(0, [0], 0, 0, 0).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    assert philox(-1, [ones], ones, ones, ones).tolist() == [
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    ]


# Tokens of the tiny pair, and how its target and draft weigh them after each last token.
VOCABULARY = 4
TARGET = torch.tensor([[5, 3, 1, 1], [1, 6, 2, 1], [2, 2, 2, 4], [1, 1, 7, 1]]).double().log()
DRAFT = torch.tensor([[4, 1, 3, 2], [2, 2, 5, 1], [1, 3, 3, 3], [3, 1, 4, 2]]).double().log()
SHAPES = {"chain": (-1, 0, 1, 2), "tree": (-1, 0, 0, 1, 1, 3), "whole vocabulary": (-1, 0, 0, 0, 0)}


def bigram(weights):
    """A model whose next token depends on the last one; its cache is that of a real one."""

    def model(tokens, positions, sees, cache):
        own = positions[:, None].double()
        known = torch.cat([*cache, own], dim=-2)
        # What it sees is its own path: one token at each position, and itself last.
        for row, seen in enumerate(sees):
            assert known[seen, 0].sort().values.tolist() == list(range(int(positions[row]) + 1))
        return weights[tokens], [known]

    return model


def test_greedy_tokens_are_those_of_plain_decoding():
    target, draft = embedded_model("target"), embedded_model("draft")
    rng, accepted = torch.Generator().manual_seed(0), 0
    for prompt in ([5, 9, 40, 7, 3], list(range(30, 60))):
        request = begin(target, prompt, 0.0, rng)
        for _ in range(12):
            accepted += step(target, draft, request, EMBEDDED_PARENTS, 0.0, rng)
        assert request.tokens == greedy_tokens(target, prompt, len(request.tokens) - len(prompt))
    assert accepted > 6  # trees took part


@pytest.mark.parametrize(
    ("parents", "temperature"), [*((SHAPES[name], 1.0) for name in SHAPES), (SHAPES["tree"], 0.5)]
)
def test_three_tokens_have_the_targets_law(parents, temperature):
    """A chi-square test of all 64 outcomes; it fails by chance once in a million runs."""
    rng = torch.Generator().manual_seed(1)
    target, draft = bigram(TARGET), bigram(DRAFT)
    rounds, counts = 1500, torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY)
    for _ in range(rounds):
        request = begin(target, [0], temperature, rng)
        while len(request.tokens) < 4:
            step(target, draft, request, parents, temperature, rng)
        counts[tuple(request.tokens[1:4])] += 1
    law = (TARGET / temperature).softmax(-1)
    expected = law[0, :, None, None] * law[:, :, None] * law[None]
    assert_same_law(counts.numpy(), expected.numpy(), fewest=0)


def test_a_verifier_that_forgets_rejected_tokens_is_caught(monkeypatch):
    """The test above sees Algorithm 2's usual mistake: the residual left out."""
    monkeypatch.setattr(reference_step, "verify", _without_residual)
    with pytest.raises(AssertionError):
        test_three_tokens_have_the_targets_law(SHAPES["tree"], 1.0)


def _without_residual(tree, logits, temperature, rng):
    accepted, node = [], 0
    while True:
        p = reference_step.distribution(logits[node], temperature)
        for child in tree.children(node):
            token = int(tree.tokens[child])
            if torch.rand((), generator=rng) * tree.q[node][token] < p[token]:
                accepted.append(child)
                break
        else:
            return accepted, int(torch.multinomial(p, 1, generator=rng))
        node = accepted[-1]


def test_the_reference_step_shows_trees_and_walks(capsys):
    """``python -m sequoia_vllm.reference_step``; every step adds what it says."""
    runpy.run_path(reference_step.__file__, run_name="__main__")
    steps = [step.splitlines() for step in capsys.readouterr().out.strip().split("\n\n")]
    assert len(steps) == 3
    for (first, root, *nodes, last), following in zip(steps, [*steps[1:], None], strict=True):
        accepted = [node.split()[1] for node in nodes if node[0] == "*"]
        assert len(nodes) == 6
        assert root.split() == ["*", first.split()[-1]]
        assert last.startswith(f"accepted: {len(accepted)}, and the target adds: ")
        if following:
            assert following[0].split() == [*first.split(), *accepted, last.split()[-1]]
    assert any("*     " in node for step in steps for node in step)  # one at least was accepted
