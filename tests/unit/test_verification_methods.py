"""The registry of verification methods."""

import random

import pytest

from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.verification import methods
from sequoia_vllm.verification.methods import VerificationMethod, method_names, method_of, register
from tests.support.target_only import TARGET_ONLY
from tests.support.tree_problems import as_lists, generator, random_problem, verify_tree


@pytest.fixture
def target_only(monkeypatch):
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    register(TARGET_ONLY)


def test_the_default_comes_first():
    assert method_names()[0] == methods.DEFAULT_METHOD == "sequoia"


@pytest.mark.parametrize("name", method_names())
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
    assert method_names() == ("sequoia", "traversal", "target-only")
    config = {"method": "sequoia", "verification": "target-only"}
    assert SequoiaConfig.parse(config).verification == "target-only"
    problem = random_problem(random.Random(3)).tensors(50)
    found = as_lists(verify_tree(*problem, generator(5), method="target-only"))
    assert {len(accepted) for accepted, _ in found} == {0}
    assert len({emitted[0] for _, emitted in found}) > 1


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="there is a method 'traversal' of verification already"):
        register(VerificationMethod("traversal", host="a:b", kernel="c:d"))
