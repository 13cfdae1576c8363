"""What is the traversal's own; test_verifier.py compares its decisions with the plain form's."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from sequoia_vllm.testing.verification import match
from sequoia_vllm.verification import traverse_tree, verify_tree
from tests.support.tree_problems import (
    Problem,
    as_lists,
    generator,
    problems,
    random_problem,
)

verify = {"method": "traversal"}


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
