"""The registry of verification methods."""

import random
from dataclasses import replace

import pytest

from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.verification import methods
from sequoia_vllm.verification.methods import VerificationMethod, method_names, method_of, register
from tests.support.plans import planned
from tests.support.target_only import TARGET_ONLY
from tests.support.tree_problems import as_lists, generator, random_problem, verify_tree

PAIR = PairKey("a device", "a/target", "a/draft", "bfloat16")


@pytest.fixture
def target_only(monkeypatch):
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    register(TARGET_ONLY)


def test_the_default_comes_first():
    assert method_names()[0] == methods.DEFAULT_METHOD == "sequoia"


def test_traversal_is_usual_on_gpus_once_it_has_run_on_one(monkeypatch):
    config = SequoiaConfig(model="a/draft")
    for ran_on, usual in ((None, "sequoia"), ("a GPU", "traversal")):
        ran = replace(method_of("traversal"), ran_on=ran_on)
        monkeypatch.setitem(methods._METHODS, "traversal", ran)
        assert planned(config, PAIR, on_cpu=False).settings.verification == usual
        assert planned(config, PAIR, on_cpu=True).settings.verification == "sequoia"
        asked = config.model_copy(update={"verification": "sequoia"})
        assert planned(asked, PAIR, on_cpu=False).settings.verification == "sequoia"


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
