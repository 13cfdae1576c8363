"""Trees with replaced tokens keep the target's law: exactly, and sampled with the fast verifiers.

The target follows a grammar: after each path some tokens are impossible. A drafted token that
is becomes another one, chosen by the grammar and the drafted siblings, and what was drafted
below it is judged after that one.
"""

import random
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch

from sequoia_vllm.verification import replaced
from sequoia_vllm.verification.methods import method_of
from sequoia_vllm.verification.replaced import verify_replaced
from sequoia_vllm.verification.topology import VerifyResult
from tests.oracles.laws import (
    assert_same_law,
    autoregressive_law,
    emitted_law,
    exact_law,
    expected_tokens,
)
from tests.oracles.verification import algorithm_2, children_of, normalized, path_tokens, traversal
from tests.support.exact_models import depth_of, models

RULES = {"sequoia": algorithm_2, "traversal": traversal}
both_methods = pytest.mark.parametrize("method", RULES)
#   0 ─┬─ 1 ─┬─ 3        0 ─┬─ 1 ─── 2 ─── 3
#      │     └─ 4           └─ 4
#      └─ 2 ─── 5
SHAPES = {"wide": [-1, 0, 0, 1, 1, 2], "deep": [-1, 0, 1, 2, 0]}


def following_a_grammar(kind, vocabulary=3):
    """P and Q as functions of the path; P is possible for some of the tokens only."""
    target, draft = models(kind, vocabulary)

    @cache
    def within(path):
        rng = random.Random(f"grammar {path}")
        allowed = rng.sample(range(vocabulary), rng.randint(1 if path else 2, vocabulary - 1))
        weights = [p if token in allowed else 0 * p for token, p in enumerate(target(path))]
        if not any(weights):
            weights = [Fraction(int(token in allowed)) for token in range(vocabulary)]
        return tuple(normalized(weights))

    return within, draft


def stand_ins(target, path, siblings):
    """A token for each sibling: its own, or where that is impossible mostly another."""
    free = [token for token, p in enumerate(target(path)) if p and token not in siblings]
    rng = random.Random(f"{path} {siblings}")
    rng.shuffle(free)
    stays = rng.random() < 0.2
    return [
        free.pop() if not target(path)[token] and free and not stays else token
        for token in siblings
    ]


def scored_tokens(target, parents, drawn, choose=stand_ins):
    scored = list(drawn)
    for node, children in enumerate(children_of(parents)):
        found = choose(
            target, path_tokens(scored, parents, node), [drawn[child] for child in children]
        )
        for child, token in zip(children, found, strict=True):
            scored[child] = token
    return scored


def by_rule(rule, chance):
    """`verify` for one tree, by a plain rule: distributions stay what they are, fractions."""

    def verify(target_at, draft_at, tokens, parents, generator):
        [own], [row] = parents.tolist(), tokens.tolist()
        size = sum(parent != -2 for parent in own)
        accepted, emitted = rule(
            lambda node: target_at(torch.tensor([0]), torch.tensor([node])),
            lambda node: draft_at(torch.tensor([0]), torch.tensor([node])),
            row, children_of(own[:size]), chance,
        )  # fmt: skip
        depth = depth_of(own)
        return VerifyResult(
            torch.tensor([accepted + [-1] * (depth - len(accepted))], dtype=torch.int64),
            torch.tensor([emitted + [-1] * (depth + 1 - len(emitted))]),
            torch.tensor([len(accepted)]),
        )

    return verify


def with_stand_ins(rule, target, draft, parents, choose=stand_ins):
    """A verifier of drawn trees that are scored with replaced tokens."""

    def verifier(_, draft_at, drawn, children, chance):
        scored = scored_tokens(target, parents, drawn, choose)
        found = verify_replaced(
            by_rule(rule, chance),
            lambda _, nodes: target(path_tokens(scored, parents, int(nodes))),
            lambda _, nodes: draft_at(int(nodes)),
            torch.tensor([drawn]), torch.tensor([scored]), torch.tensor([parents]),
        )  # fmt: skip
        [count] = found.num_accepted.tolist()
        accepted = found.accepted_nodes[0, :count].tolist()
        emitted = found.output_tokens[0, : count + 1].tolist()
        assert [scored[node] for node in accepted] == emitted[:count]
        return accepted, emitted

    return verifier


def laws(method, shape, wrong=None, kind="dense"):
    """The law of trees with replaced tokens, or of a wrong verifier; and the target's."""
    parents = SHAPES[shape]
    target, draft = following_a_grammar(kind)
    length = depth_of(parents) + 1
    rule = RULES[method]
    verifier = (
        wrong(rule, target, parents) if wrong else with_stand_ins(rule, target, draft, parents)
    )
    found = exact_law(target, draft, parents, 3, length, verifier)
    return found, autoregressive_law(target, 3, length)


def error(found, expected):
    return sum(abs(found[tokens] - expected[tokens]) for tokens in expected)


@pytest.mark.parametrize("kind", ["dense", "zeros in Q", "one-hot Q", "one-hot P", "disjoint"])
@pytest.mark.parametrize("shape", SHAPES)
@both_methods
def test_the_law_is_the_targets(method, shape, kind):
    found, expected = laws(method, shape, kind=kind)
    assert found == expected


@both_methods
def test_more_is_accepted_than_without(method):
    target, draft = following_a_grammar("dense")
    parents = SHAPES["wide"]
    verifier = with_stand_ins(RULES[method], target, draft, parents)
    without, found = (
        expected_tokens(emitted_law(target, draft, parents, each))
        for each in (RULES[method], verifier)
    )
    assert found > 1.1 * without


def like_draws(rule, target, parents):
    """The wrong thing: what was replaced is verified as if it had been drawn."""

    def verifier(_, draft_at, drawn, children, chance):
        scored = scored_tokens(target, parents, drawn)
        paths = [path_tokens(scored, parents, node) for node in range(len(parents))]
        return rule(lambda node: target(paths[node]), draft_at, scored, children, chance)

    return verifier


@both_methods
@pytest.mark.parametrize("shape", SHAPES)
def test_a_replaced_token_is_no_draw(method, shape):
    assert error(*laws(method, shape, like_draws)) > 0.005


@both_methods
@pytest.mark.parametrize("shape", SHAPES)
def test_the_drawn_token_was_a_draw(method, shape, monkeypatch):
    """Leaving it out of the tree gives others than it the chance that it had."""
    subtrees = replaced._subtrees

    def forgetful(roots, parents, is_replaced, depth):
        nodes = torch.arange(parents.shape[1])
        forgotten = is_replaced & (nodes != roots[:, None])
        return subtrees(roots, parents.masked_fill(forgotten, -2), is_replaced, depth)

    monkeypatch.setattr(replaced, "_subtrees", forgetful)
    assert error(*laws(method, shape)) > 0.005


@both_methods
def test_a_choice_by_what_is_below_is_not_lossless(method):
    """The condition on choices is needed: here a token is chosen for the one drawn below it."""
    parents, third = [-1, 0, 1], Fraction(1, 3)
    likely = {0: (Fraction(3, 4), Fraction(1, 4), 0), 1: (Fraction(1, 4), Fraction(3, 4), 0)}

    def target(path):
        return likely.get(path[-1], (third,) * 3) if path else (Fraction(1, 2), Fraction(1, 2), 0)

    def draft(path):
        return (third,) * 3

    def error_of(choose_for):
        def verifier(_, draft_at, drawn, children, chance):
            def choose(target, path, siblings):
                return [choose_for(drawn)] if not path and siblings == [2] else siblings

            own = with_stand_ins(RULES[method], target, draft, parents, choose)
            return own(_, draft_at, drawn, children, chance)

        expected = autoregressive_law(target, 3, 3)
        return error(exact_law(target, draft, parents, 3, 3, verifier), expected)

    assert error_of(lambda drawn: 1) == 0
    assert error_of(lambda drawn: min(drawn[2], 1)) > 0.01


SAMPLES = 40_000
VOCABULARY = 4
#   0 ─┬─ 1 ─┬─ 2 ── 5
#      ├─ 3  └─ 4
#      └─ 6
TREE = [-1, 0, 1, 0, 1, 2, 0]
TRIMMED = [-1, 0, 1, 0, 1, -2, -2]


class Tables:
    """P and Q of every path as tensors; a path is a state, the root's is 0."""

    def __init__(self, length):
        target, draft = following_a_grammar("dense", VOCABULARY)
        paths = [p for n in range(length) for p in product(range(VOCABULARY), repeat=n)]
        self.target = torch.zeros(len(paths), VOCABULARY)
        self.draft = torch.zeros(len(paths), VOCABULARY)
        for path in paths:
            state = 0
            for token in path:
                state = self.after(state, token)
            self.target[state] = torch.tensor([float(p) for p in target(path)])
            self.draft[state] = torch.tensor([float(p) for p in draft(path)])

    def after(self, state, token):
        return state * VOCABULARY + token + 1


def lowest_stand_ins(possible, siblings):
    """bool ``[B, V]`` and int64 ``[B, b]``: the lowest possible tokens, where there are any."""
    found, free = siblings.clone(), possible.clone()
    free.scatter_(1, siblings, False)
    for column in range(siblings.shape[1]):
        token = siblings[:, column, None]
        change = ~possible.gather(1, token).squeeze(1) & free.any(dim=1)
        lowest = free.int().argmax(dim=1)
        found[:, column] = torch.where(change, lowest, siblings[:, column])
        free[change, lowest[change]] = False
    return found


def drafted(tables, generator):
    """Tokens as drawn and as scored, and the states after both, all ``[SAMPLES, N]``."""
    drawn, scored, drawn_state, state = torch.zeros(4, SAMPLES, len(TREE), dtype=torch.int64)
    for node, children in enumerate(children_of(TREE)):
        if not children:
            continue
        weights = tables.draft[drawn_state[:, node]]
        tokens = torch.multinomial(weights, len(children), generator=generator)
        own = lowest_stand_ins(tables.target[state[:, node]] > 0, tokens)
        drawn[:, children], scored[:, children] = tokens, own
        drawn_state[:, children] = tables.after(drawn_state[:, node, None], tokens)
        state[:, children] = tables.after(state[:, node, None], own)
    return drawn, scored, drawn_state, state


@pytest.mark.slow
@both_methods
def test_sampled_trees_are_lossless(method):
    """By Algorithm 2 in torch and compiled traversal, whole trees and trimmed ones in one batch."""
    length = depth_of(TREE) + 1
    tables, generator = Tables(length), torch.Generator().manual_seed(0)
    drawn, scored, drawn_state, state = drafted(tables, generator)
    parents = torch.tensor([TREE, TRIMMED]).repeat(SAMPLES // 2, 1)
    padding = parents == -2
    drawn, scored = drawn.masked_fill(padding, 0), scored.masked_fill(padding, 0)
    found = verify_replaced(
        method_of(method).host_function(),
        lambda requests, nodes: tables.target[state[requests, nodes]],
        lambda requests, nodes: tables.draft[drawn_state[requests, nodes]],
        drawn, scored, parents, generator,
    )  # fmt: skip
    path = found.accepted_nodes.clamp(min=0)
    accepted = (drawn != scored).gather(1, path) & (found.accepted_nodes >= 0)
    assert accepted.sum(dim=1).float().mean() > 0.2  # replaced ones
    assert accepted.all(dim=1).any()  # one after another
    for which in (0, 1):
        check(tables, found.output_tokens[which::2], generator)


def check(tables, emitted, generator):
    states = cells = torch.zeros(len(emitted), dtype=torch.int64)
    law, after = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    for position in range(emitted.shape[1]):
        sampled = torch.multinomial(tables.target[states], 1, generator=generator)[:, 0]
        token = torch.where(emitted[:, position] < 0, sampled, emitted[:, position])
        cells, states = cells * VOCABULARY + token, tables.after(states, token)
        law = (law[:, None] * tables.target[after]).flatten()
        after = tables.after(after[:, None], torch.arange(VOCABULARY)).flatten()
    assert_same_law(torch.bincount(cells, minlength=len(law)).numpy(), law.double().numpy())


@both_methods
def test_what_a_stream_gives_does_not_depend_on_decisions(method):
    """Or ranks of one group that round differently would draw different trees from then on."""
    states = []
    # What replaces a node, and what does not.
    for likely, accepted, emitted in ((3, [1, -1], [3, 3, -1]), (5, [-1, -1], [5, -1, -1])):
        target, generator = torch.zeros(6), torch.Generator().manual_seed(1)
        target[likely] = 1
        found = verify_replaced(
            method_of(method).host_function(),
            lambda requests, nodes, target=target: target.repeat(len(requests), 1),
            lambda requests, nodes: torch.full((len(requests), 6), 1 / 6),
            torch.tensor([[0, 1, 2]]), torch.tensor([[0, 3, 4]]), torch.tensor([[-1, 0, 1]]),
            generator,
        )  # fmt: skip
        assert found.accepted_nodes.tolist() == [accepted]
        assert found.output_tokens.tolist() == [emitted]
        states.append(generator.get_state())
    assert torch.equal(*states)
