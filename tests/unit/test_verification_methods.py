"""The registry of verification methods, the topologies that they walk, and the traversal."""

import random
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification import methods, traversal
from sequoia_vllm.verification.methods import VerificationMethod, method_of, register
from sequoia_vllm.verification.topology import Topology
from sequoia_vllm.verification.traversal import traverse_tree
from sequoia_vllm.verification.walk import node_uniforms
from tests.oracles.verification import Uniforms, children_of
from tests.oracles.verification import traversal as plain_form
from tests.support.plans import planned
from tests.support.reference_trees import trees
from tests.support.target_only import TARGET_ONLY
from tests.support.tree_problems import Problem, as_lists, generator, random_problem, verify_tree

PAIR = PairKey("a device", "a/target", "a/draft", "bfloat16")


@pytest.fixture
def target_only(monkeypatch):
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    register(TARGET_ONLY)


def test_the_ten_lines_for_researchers_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "trees.md").read_text("utf-8")
    [code] = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("(-1, 0, 1, ")
    assert SequoiaConfig(verification="mine", tree="mine.json").loaded().tree.tree.size == 8
    assert method_of("mine").host == "my_package:on_host"


def test_the_default_comes_first_and_a_name_is_given_once():
    assert next(iter(methods._METHODS)) == methods.DEFAULT_METHOD == "sequoia"
    with pytest.raises(ValueError, match="there is a method 'traversal' of verification already"):
        register(VerificationMethod("traversal", host="a:b", kernel="c:d"))


def test_traversal_is_usual_on_gpus_once_it_has_run_on_one(monkeypatch):
    config = SequoiaConfig(model="a/draft")
    for ran_on, usual in ((None, "sequoia"), ("a GPU", "traversal")):
        ran = replace(method_of("traversal"), ran_on=ran_on)
        monkeypatch.setitem(methods._METHODS, "traversal", ran)
        assert planned(config, PAIR, on_cpu=False).settings.verification == usual
        assert planned(config, PAIR, on_cpu=True).settings.verification == "sequoia"
        asked = config.model_copy(update={"verification": "sequoia"})
        assert planned(asked, PAIR, on_cpu=False).settings.verification == "sequoia"


@pytest.mark.parametrize("name", [*methods._METHODS])
def test_all_code_of_a_method_is_there(name):
    method = method_of(name)
    assert callable(method.host_function())
    pytest.importorskip("triton")
    assert callable(method.kernel_launcher())
    method.compile_host()
    tables = method.tree_tables([-1, 0, 0], "cpu")
    assert (tables is None) == (method.tables is None)


@pytest.mark.usefixtures("target_only")
def test_one_registration_makes_a_method_known():
    assert tuple(methods._METHODS) == ("sequoia", "traversal", "target-only")
    for name in methods._METHODS:
        config = {"method": "sequoia", "verification": name}
        assert SequoiaConfig.parse(config).verification == name
    problem = random_problem(random.Random(3)).tensors(50)
    found = as_lists(verify_tree(*problem, generator(5), method="target-only"))
    assert {len(accepted) for accepted, _ in found} == {0}
    assert len({emitted[0] for _, emitted in found}) > 1


@settings(deadline=None)
@given(st.lists(trees(12), min_size=1, max_size=4), st.integers(0, 2))
@example([TokenTree((-1, 0, 1, 0, 1, 0))], 0)  # siblings need not be neighbours
def test_look_ups_are_those_of_the_trees(batch, more):
    """Which are padded with -2, up to two nodes behind the largest."""
    width = max(tree.size for tree in batch) + more
    parents = [[*tree.parents, *[-2] * (width - tree.size)] for tree in batch]
    dtype = (torch.int32, torch.int64)[len(batch) % 2]
    topology = Topology.from_parents(torch.tensor(parents, dtype=dtype))
    branches = [0] * (max(tree.depth for tree in batch) + 1)
    for rows, tree in zip(topology.children.tolist(), batch, strict=True):
        for node, children in enumerate([*tree.children, *[()] * (width - tree.size)]):
            assert rows[node] == [*children, *[-1] * (len(rows[node]) - len(children))]
        for level, children in zip(tree.depths, tree.children, strict=True):
            branches[level] = max(branches[level], len(children))
    assert topology.branches == tuple(branches)
    assert topology.max_depth == len(branches) - 1


def test_a_batch_without_trees_has_one_level():
    assert Topology.from_parents(torch.empty(0, 5, dtype=torch.int64)).branches == (0,)


def test_look_ups_go_to_the_device_that_is_asked_for():
    topology = Topology.from_parents(torch.tensor([[-1, 0, 0]]), torch.device("meta"))
    tensors = topology.parents, topology.depths, topology.children
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert topology.branches == (2, 0)


@pytest.mark.parametrize(
    ("parents", "node"),
    [
        ([0, 0], 0),  # the root has a parent
        ([-2, -2], 0),  # no root
        ([-1, -1], 1),  # a second root
        ([-1, 1], 1),  # its own parent
        ([-1, 2, 0], 1),  # a parent after its child
        ([-1, 0, -3], 2),
        ([-1, -2, 0], 2),  # padding before a node
    ],
)
def test_what_is_no_tree_is_refused_by_request_and_node(parents, node):
    good = [-1] + [0] * (len(parents) - 1)
    with pytest.raises(ValueError, match=f"request 1: node {node} has parent {parents[node]}"):
        Topology.from_parents(torch.tensor([good, parents]))


@pytest.mark.parametrize("shape", [(2,), (2, 0)])
def test_parents_of_the_wrong_shape_are_refused(shape):
    with pytest.raises(ValueError, match="parents must be"):
        Topology.from_parents(torch.zeros(shape, dtype=torch.int64))


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


def test_tensors_of_another_device_and_unknown_methods_are_refused():
    target, draft, tokens, parents = random_problem(random.Random(3)).tensors()
    with pytest.raises(ValueError, match="trees on meta: this traversal is for tensors on the CPU"):
        verify_tree(target, draft, tokens.to("meta"), parents, **verify)
    with pytest.raises(ValueError, match="no method 'block': give one of sequoia, traversal"):
        verify_tree(target, draft, tokens, parents, method="block")


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
