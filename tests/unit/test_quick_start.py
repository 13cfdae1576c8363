"""Processes of the tests import the same things, sooner (`tests/quick_start`)."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest
import transformers

from tests.quick_start.quick_imports import (
    LOADERS,
    LazyLoader,
    read_models_once,
    register_kernels_once,
    wait_asleep,
)

SOURCE = """
TIMES = []
def double(number):
    TIMES.append(number)
    return 2 * number
"""


@pytest.fixture
def lazy(tmp_path, monkeypatch) -> ModuleType:
    (tmp_path / "late_module.py").write_text(SOURCE)
    spec = PathFinder.find_spec("late_module", [str(tmp_path)])
    spec.loader = LazyLoader(spec.loader, ("double",))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "late_module", module)
    spec.loader.exec_module(module)
    return module


def test_code_runs_when_it_is_needed(lazy):
    assert lazy.__file__.endswith("late_module.py")
    assert not hasattr(lazy, "__wrapped__")  # as `inspect` asks
    assert "TIMES" not in vars(lazy)
    assert lazy.TIMES == []
    assert lazy.double(4) == 8
    with pytest.raises(AttributeError, match="treble"):
        _ = lazy.treble


def test_functions_can_be_imported_before(lazy):
    double = lazy.double
    assert "TIMES" not in vars(lazy)
    assert double(3) == 6
    assert lazy.double is not double  # from now on
    assert double(4) == lazy.double(4) == 8
    assert lazy.TIMES == [3, 4, 4]


def test_names_without_code_are_errors(lazy):
    with pytest.raises(AttributeError, match="treble"):
        _ = lazy.treble


def test_transformers_finds_the_same_models():
    utils = Path(transformers.__file__).parent / "utils"

    def load() -> ModuleType:
        spec = PathFinder.find_spec("transformers.utils.import_utils", [str(utils)])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    plain, quick = load(), load()
    read_models_once(quick)
    folders = sorted((utils.parent / "models").glob("l*"))  # a twentieth: Llama's, too
    found = [quick.define_import_structure(folder) for folder in folders]
    assert found == [plain.define_import_structure(folder) for folder in folders]
    assert sum(len(names) for structure in found for names in structure.values()) > 50


def test_kernels_are_registered_once():
    registered = []
    dispatcher = ModuleType("dispatcher")
    dispatcher._registry = {}

    def register(overrides):
        registered.append(list(overrides))
        dispatcher._registry.update(overrides)

    dispatcher.register_kernels = register
    register_kernels_once(dispatcher)
    for names in ("ab", "ab", "abc", "c"):
        dispatcher.register_kernels(dict.fromkeys(names))
    assert registered == [["a", "b"], ["a", "b", "c"]]


def test_vllm_waits_as_these_tests_replace_it():
    """By these names, or nothing would be replaced."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.triton_utils import dispatcher

    assert {"sched_yield"} <= set(shm_broadcast.SpinCondition.wait.__code__.co_names)
    assert {"register_kernels", "_registry"} <= vars(dispatcher).keys()
    module = ModuleType("shm_broadcast")
    wait_asleep(module)
    assert module.sched_yield() is None


@pytest.mark.parametrize("name", LOADERS)
def test_the_modules_exist(name):
    assert importlib.util.find_spec(name) is not None
