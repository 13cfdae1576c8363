"""What is the traversal's own; test_verifier.py compares its decisions with the plain form's."""

import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from sequoia_vllm.verification import traversal
from sequoia_vllm.verification.topology import Topology
from sequoia_vllm.verification.traversal import traverse_tree
from sequoia_vllm.verification.walk import node_uniforms
from tests.oracles.verification import Uniforms, children_of, match
from tests.oracles.verification import traversal as plain_form
from tests.support.tree_problems import (
    Problem,
    as_lists,
    generator,
    problems,
    random_problem,
    verify_tree,
)

verify = {"method": "traversal"}


def test_nodes_with_children_are_asked_for_at_once():
    """A draft that is the target: the first leaf is accepted, at the end of its path."""
    half = [Fraction(1, 2), Fraction(1, 2)]
    problem = Problem([-1, 0, 0, 1, 1], [0, 0, 1, 0, 1], [half] * 5, [half] * 5)
    target, draft, tokens, parents = problem.tensors(20)
    asked = {"target": [], "draft": []}

    def at(name, values):
        def found(requests, nodes):
            assert sorted(set(requests.tolist())) == list(range(20))
            asked[name].append(sorted(set(nodes.tolist())))
            return values[requests, nodes]

        return found

    found = traverse_tree(at("target", target), at("draft", draft), tokens, parents, generator(1))
    assert found.accepted_nodes.tolist() == [[1, 3]] * 20
    assert asked == {"target": [[0, 1], [3]], "draft": [[0, 1]]}


def test_without_a_compiler_algorithm_2_verifies(monkeypatch):
    problem = random_problem(random.Random(3)).tensors(50)
    monkeypatch.setattr(traversal, "load_traversal", lambda: None)
    found = verify_tree(*problem, generator(5), **verify)
    assert as_lists(found) == as_lists(verify_tree(*problem, generator(5), method="sequoia"))


def test_tensors_of_another_device_are_refused():
    target, draft, tokens, parents = random_problem(random.Random(3)).tensors()
    with pytest.raises(ValueError, match="trees on meta: this traversal is for tensors on the CPU"):
        verify_tree(target, draft, tokens.to("meta"), parents, **verify)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the plain form's, where Q is tiny
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_vocabularies(dtype, threads, monkeypatch):
    """More tokens than lanes, than a block of sums, and as many requests as make threads pay."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    compared = Counter()
    for vocabulary, batch in ((15, 3), (16, 3), (40, 3), (4096, 3), (9001, 40)):
        stream = generator(vocabulary)
        parents = torch.tensor([-1, 0, 0, 0, 1, 1, 4, 2]).expand(batch, -1)
        shape = (batch, parents.shape[1], vocabulary)
        target, draft = (torch.rand(shape, dtype=dtype, generator=stream).pow_(8) for _ in range(2))
        target, draft = (values / values.sum(2, keepdim=True) for values in (target, draft))
        tokens = torch.stack(
            [torch.randperm(vocabulary, generator=stream)[: shape[1]] for _ in range(batch)]
        )
        # Some children that Q likes less than P.
        tokens[:, 1:3] = (target[:, 0] / draft[:, 0]).topk(2).indices
        topology = Topology.from_parents(parents)
        compiled = verify_tree(target, draft, tokens, topology, generator(7), **verify)
        uniforms = node_uniforms(tokens, generator(7)).tolist()
        expected = [
            plain_form(
                target[row].numpy().__getitem__, draft[row].numpy().__getitem__,
                tokens[row].tolist(), children_of(parents[0].tolist()), Uniforms(uniforms[row]),
            )
            for row in range(batch)
        ]  # fmt: skip
        assert as_lists(compiled) == expected
        compared.update(compiled.num_accepted.tolist())
    assert len(compared) > 2


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
