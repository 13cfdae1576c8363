"""The traversal of a batch takes the decisions of the plain form, from the same numbers."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.testing.verification import match, traversal
from sequoia_vllm.verification import traverse_tree, verify_tree
from tests.support.tree_problems import (
    Edges,
    FarFromEdges,
    Problem,
    as_lists,
    batch_of,
    generator,
    problems,
    random_problem,
    with_uniforms,
)

verify = {"method": "traversal"}


@settings(deadline=None, max_examples=100)
@given(problems)
def test_every_decision_has_the_probability_of_the_plain_form(problem):
    """In float64, all outcomes: each threshold agrees with the exact one to 1e-9."""
    expected, uniforms, scripts = [], [], [[]]
    while scripts:
        edges = Edges(scripts.pop())
        expected.append(problem.reference(edges, traversal))
        scripts += edges.alternatives
        uniforms.append([edges.uniforms.get(n, math.nan) for n in range(len(problem.parents))])
    with with_uniforms(torch.tensor(uniforms, dtype=torch.float64)):
        result = verify_tree(*problem.tensors(len(uniforms), torch.float64), **verify)
    assert as_lists(result) == expected


def test_a_request_uses_one_float64_uniform_per_node_in_node_order():
    """The documented stream: with it the plain form repeats a float32 run."""
    compared = 0
    for seed in range(300):
        problem = random_problem(random.Random(seed))
        own = generator(seed)
        result = verify_tree(*problem.tensors(), [own], **verify)
        stream = generator(seed)
        size = len(problem.parents)
        chance = FarFromEdges(torch.rand(size, dtype=torch.float64, generator=stream).tolist())
        expected = problem.reference(chance, traversal)
        assert torch.equal(own.get_state(), stream.get_state())
        if not chance.near:
            compared += 1
            assert as_lists(result) == [expected]
    assert compared > 250


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 3))
def test_a_batch_is_its_requests_one_by_one(seed, extra):
    """Trees of many shapes, some of them alike; nothing that is not theirs is read."""
    rng = random.Random(seed)
    mixed = [random_problem(rng) for _ in range(rng.randint(1, 6))]
    mixed += rng.choices(mixed, k=2)
    width = max(len(p.parents) for p in mixed) + extra
    target, draft, tokens, parents = batch_of(mixed, width)
    own = [generator(i) for i in range(len(mixed))]
    together = as_lists(verify_tree(target, draft, tokens, parents, own, **verify))
    for i, problem in enumerate(mixed):
        size = len(problem.parents)
        alone = verify_tree(
            *(part[i : i + 1, :size] for part in (target, draft, tokens, parents)),
            [generator(i)],
            **verify,
        )
        assert as_lists(alone) == [together[i]]


def test_nothing_is_asked_of_nodes_that_are_not_visited():
    """A draft that is the target: the first leaf is accepted, at the end of its path."""
    half = [Fraction(1, 2), Fraction(1, 2)]
    problem = Problem([-1, 0, 0, 1, 1], [0, 0, 1, 0, 1], [half] * 5, [half] * 5)
    target, draft, tokens, parents = problem.tensors(20)
    asked = {"target": [], "draft": []}

    def at(name, values):
        def found(requests, nodes):
            asked[name].append((requests.tolist(), nodes.unique().tolist()))
            return values[requests, nodes]

        return found

    found = traverse_tree(at("target", target), at("draft", draft), tokens, parents, generator(1))
    assert found.accepted_nodes.tolist() == [[1, 3]] * 20
    everyone = list(range(20))
    assert asked["target"] == [(everyone, [node]) for node in (0, 1, 3)]
    assert asked["draft"] == [(everyone, [node]) for node in (0, 1)]


@settings(deadline=None, max_examples=100)
@given(problems)
def test_a_one_hot_target_is_matched(problem):
    best = [int(np.argmax(row)) for row in problem.target]
    target, draft, tokens, parents = problem.tensors()
    one_hot = torch.nn.functional.one_hot(torch.tensor(best), target.shape[2]).float()[None]
    children = [
        [child for child, parent in enumerate(problem.parents) if parent == node]
        for node in range(len(problem.parents))
    ]
    expected = match(lambda node, _: best[node], problem.tokens, children)
    result = verify_tree(one_hot, draft, tokens, parents, generator(0), **verify)
    assert as_lists(result) == [expected]


def test_an_unknown_method_is_refused():
    problem = random_problem(random.Random(0))
    with pytest.raises(ValueError, match="no method 'block': give one of sequoia, traversal"):
        verify_tree(*problem.tensors(), method="block")
