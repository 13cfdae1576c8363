"""Reading the contract from sources answers as importing them does."""

import ast
import json
import sys
from dataclasses import replace

import pytest

from sequoia_vllm.engine.compat import contract, versions
from sequoia_vllm.engine.compat.ledger import LEDGER, Expected, expected
from tests.contract import used
from tests.contract.sources import Sources, source_differences

# One of each way in which vLLM defines what we rely on. Whole files, so that the
# package can be imported for real and asked by `inspect`.
PACKAGE = {
    "__init__.py": "",
    "base.py": """
import functools
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from nowhere import Imaginary

Item = TypeVar("Item")

def kept(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

class Runner(ABC, Generic[Item]):
    width = 1
    depth: int = 2
    height: int

    def __init__(self, config, device=None): ...

    @kept
    def step(self, batch, /, *rows, padded=False, **rest): ...

    @staticmethod
    def add_arguments(parser): ...

    @classmethod
    def build(cls, config): ...

    @property
    def size(self): ...

    @abstractmethod
    async def later(self, request): ...

@functools.lru_cache(maxsize=None)
def select(name, dtype): ...

def plain(a, b): ...

def grown(a, b, c=0, *, d=None): ...

def demanding(a, b, c, d=0, *, e): ...

@dataclass
class Metric:
    name: str
    width: int = field(repr=False)
    labels: dict = field(default_factory=dict)
    hidden: int = field(default=0, init=False)
    kind: ClassVar[str] = "metric"

@dataclass
class Counter(Metric):
    value: int = 0
    _: KW_ONLY
    unit: str = ""
    name: str = "again"

@dataclass(kw_only=True)
class Gauge(Metric):
    value: float = 0.0

class State(NamedTuple):
    tokens: list
    count: int = 0

class SmallState(State):
    pass

class Created:
    def __new__(cls, template): ...

class Mode(Enum):
    EAGER = "eager"
    GRAPH = "graph"

    def reset(self): ...

try:
    import no_such_package_at_all
except ImportError:
    def fallback(text): ...
else:
    def fallback(text, speed): ...

if True:
    def branch(first): ...
else:
    def branch(second): ...
""",
    "sub/__init__.py": """
from ..base import Runner as BaseRunner
from .leaf import Leaf, make as build
""",
    "sub/leaf.py": """
import json
from pathlib import Path

import PACKAGE.base
import PACKAGE.base as base_module
from PACKAGE.base import Metric, Runner

class Leaf(Runner[int]):
    def later(self, request, extra): ...

class Branch(PACKAGE.base.Runner):
    pass

class Twig(base_module.Counter):
    pass

def make(size, *, colour): ...

Alias = Leaf
again = base_module.plain
parse = json.loads
if False:
    pass
else:
    with open(__file__):
        def opened(handle): ...
""",
}

CALLABLE = [
    "base:Runner", "base:Runner.__init__", "base:Runner.step", "base:Runner.add_arguments",
    "base:Runner.build", "base:Runner.later", "base:select", "base:plain", "base:grown",
    "base:demanding", "base:Metric", "base:Counter", "base:Gauge", "base:State", "base:SmallState",
    "base:Created", "base:Mode.GRAPH.reset", "base:Mode.reset", "base:branch",
    "sub:BaseRunner.step", "sub:Leaf", "sub:build", "sub:leaf.make", "sub.leaf:Leaf.later",
    "sub.leaf:Leaf.step", "sub.leaf:Branch", "sub.leaf:Branch.build", "sub.leaf:Twig",
    "sub.leaf:Alias.later", "sub.leaf:again", "sub.leaf:Metric", "sub.leaf:opened",
]  # fmt: skip
PRESENT = [
    "base:Metric.name", "base:Counter.labels", "base:Counter.unit", "base:State.tokens",
    "base:Runner.width", "base:Runner.depth", "base:Runner.size", "base:Mode.EAGER",
    "base:select.cache_clear", "base:fallback", "sub.leaf:parse", "sub.leaf:Path.exists",
]  # fmt: skip
ABSENT = [
    "base:Imaginary", "base:Missing", "base:Runner.height", "base:Runner.missing", "base:Mode.LAZY",
    "base:plain.cache_clear", "sub:missing", "missing:Thing", "sub.missing:Thing",
]  # fmt: skip


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of `PACKAGE`, written to ``tmp_path`` and importable."""
    name = f"contract_sample_{abs(hash(tmp_path))}"
    for path, text in PACKAGE.items():
        file = tmp_path / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("PACKAGE", name))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.mark.parametrize("path", CALLABLE)
def test_parameters_are_those_of_inspect(tmp_path, package, path):
    found = contract._signature(contract._resolve(f"{package}.{path}"))
    sources = Sources(tmp_path)
    assert sources.signature(sources.find(f"{package}.{path}")) == found
    wrong = Expected(f"{package}.{path}", (*found.names, "added"))
    (difference,) = source_differences(tmp_path, [wrong])
    assert f"takes ({', '.join(found.names)}), not ({', '.join(wrong.parameters)})" in difference
    assert contract.differences([wrong]) == [difference]


@pytest.mark.parametrize(
    ("name", "may_grow", "difference"),
    [
        ("plain", False, None),
        ("plain", True, None),
        ("grown", False, "grown takes (a, b, c, d), not (a, b)"),
        ("grown", True, None),
        ("demanding", True, "demanding needs c, e, too"),
        ("select", True, "select takes (name, dtype), not (a, b, ...)"),
    ],
)
def test_what_is_only_called_may_grow(tmp_path, package, name, may_grow, difference):
    expected = Expected(f"{package}.base:{name}", ("a", "b"), may_grow)
    found = [f"{package}.base:{difference}"] if difference else []
    assert source_differences(tmp_path, [expected]) == found
    assert contract.differences([expected]) == found


@pytest.mark.parametrize("path", PRESENT)
def test_present_is_found(tmp_path, package, path):
    expected = Expected(f"{package}.{path}")
    assert contract.differences([expected]) == []
    assert source_differences(tmp_path, [expected]) == []


@pytest.mark.parametrize("path", ABSENT)
def test_absent_is_reported(tmp_path, package, path):
    expected = Expected(f"{package}.{path}")
    for (difference,) in contract.differences([expected]), source_differences(tmp_path, [expected]):
        assert difference.startswith(f"{package}.{path} is missing (")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("base:Runner.size", "is a property"),
        ("base:Runner.width", "is no function or class"),
        ("base:Mode.EAGER", "is no function or class"),
        ("sub.leaf:parse", "is no function or class"),
        ("base:Mode", "no constructor"),
    ],
)
def test_unreadable_parameters_are_a_difference(tmp_path, package, path, reason):
    (difference,) = source_differences(tmp_path, [Expected(f"{package}.{path}", ())])
    assert "has no parameters to compare" in difference
    assert reason in difference


def test_entries_are_read_by_their_notation():
    assert expected("a.b:c", None) == Expected("a.b:c")
    assert expected("a.b:C.f", "") == Expected("a.b:C.f", ())
    assert expected("a.b:g", "x, y", since=(0, 33)) == Expected("a.b:g", ("x", "y"), since=(0, 33))
    assert expected("a.b:h", "self, x, ...") == Expected("a.b:h", ("self", "x"), may_grow=True)
    assert expected("a.b:h", "...") == Expected("a.b:h", (), may_grow=True)


DEVICES = [("cpu", False), ("cpu", True), ("gpu", True)]


@pytest.mark.parametrize(("device", "v2"), DEVICES)
def test_nothing_is_expected_twice(device, v2):
    for version in versions.SUPPORTED_VERSIONS[device]:
        paths = [expected.path for expected in contract.contract(device, v2, version)]
        assert len(set(paths)) == len(paths)


@pytest.mark.parametrize(
    ("version", "path"),
    [
        ("0.32.0", "sub:build"),
        ("0.33.0", "base:plain"),
        ("0.34.1", "base:plain"),
        (None, "sub:build"),
    ],
)
def test_what_changed_is_expected_of_the_versions_that_have_it(monkeypatch, version, path):
    changed = Expected("sub:build", before=(0, 33)), Expected("base:plain", since=(0, 33))
    monkeypatch.setattr(contract, "CHANGED", changed)
    monkeypatch.setattr(contract, "vllm_version", lambda: None)
    found = contract.contract("gpu", version=version)
    assert [expected.path for expected in found if expected in changed] == [path]


def test_the_layout_of_grammars_masks_is_known_by_version():
    """It changed once, under the same signatures of all that we call: what changed with it did."""
    worker = "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker"
    parameters = {
        expected.parameters
        for version in versions.SUPPORTED_VERSIONS["gpu"]
        for expected in contract.contract("gpu", version=version)
        if expected.path == worker
    }
    assert len(parameters) == 2
    assert versions.SUPPORTED_VERSIONS["gpu"] == ("0.32.0", "0.33.0"), "has it changed again?"


def test_gpus_are_not_asked_for_what_is_on_cpus_only():
    """Importing vLLM's CPU worker changes torch for the whole process."""
    expectations = contract.contract("gpu")
    assert expectations == contract.contract("gpu", v2=True)
    modules = {expected.path.partition(":")[0] for expected in expectations}
    assert [module for module in modules if "cpu" in module] == []


def used_of_vllm(file):
    """Names that a module imports from vLLM for more than annotations."""
    tree = used.without_annotations(ast.parse(file.read_text()))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from (name.name for name in node.names if (name.asname or name.name) in names)


NOT_EXPECTED = {"current_platform"}  # reading does not find it; the contract cannot do without


@pytest.mark.parametrize(
    "file", used.engine_files(), ids=lambda file: str(file.relative_to(used.PACKAGE))
)
def test_all_that_is_used_of_vllm_is_expected(file):
    paths = [expected.path for lists in DEVICES for expected in contract.contract(*lists)]
    expected = {part for path in paths for part in path.replace(":", ".").split(".")}
    assert set(used_of_vllm(file)) - expected - NOT_EXPECTED == set()


@pytest.fixture(scope="module")
def installed():
    """Where the installed vLLM's sources are; it is not imported."""
    found = used.installed()
    if found is None:
        pytest.skip("vLLM is not installed")
    if versions.vllm_version() not in versions.SUPPORTED_VERSIONS["cpu"]:
        pytest.skip(f"vLLM {versions.vllm_version()} is not supported")
    return found


@pytest.fixture(scope="module")
def regenerated(installed):
    return used.Use(installed).to_dict()


def test_the_ledger_has_what_is_used(regenerated):
    """If not: ``python -m tests.contract.used``."""
    assert json.loads(LEDGER.read_text()) == regenerated


def test_all_that_is_replaced_says_until_when(regenerated):
    replaced = regenerated["replaced"]
    assert [path for path, one in replaced.items() if not one["until"]] == []
    ways = {one["how"] for one in replaced.values()}
    assert ways == {"patch", "added field", "swap", "subclass", "instance"}


def test_an_override_whose_signature_changed_is_told(tmp_path, installed, regenerated):
    """By the start-up contract, whatever version it is: it must take exactly what ours does."""
    [path] = [path for path in regenerated["everywhere"] if path.endswith("Scheduler.schedule")]
    [entry] = [one for one in contract.contract("cpu") if one.path == path]
    other = replace(entry, parameters=(*entry.parameters, "more"))
    assert not entry.may_grow
    names = "self, throttle_prefills"
    for found in source_differences(installed, [entry, other]), contract.differences([other]):
        assert found == [f"{path} takes ({names}), not ({names}, more)"]


@pytest.mark.parametrize(("device", "v2"), DEVICES)
def test_installed_vllm_fits_by_its_sources(installed, device, v2):
    """The CPU build carries the GPU's modules."""
    assert source_differences(installed, contract.contract(device, v2)) == []


@pytest.mark.parametrize(("device", "v2"), DEVICES)
def test_every_expected_signature_is_really_compared(installed, device, v2):
    wrong = [
        Expected(expected.path, ("other", *expected.parameters), expected.may_grow)
        for expected in contract.contract(device, v2)
        if expected.parameters is not None
    ]
    assert len(source_differences(installed, wrong)) == len(wrong) > 0
