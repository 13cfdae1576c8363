"""The registry of drafters: one registration adds a kind; classes that do not fit are refused."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

import sequoia_vllm
from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.recognition import recognise
from sequoia_vllm.drafters.registry import (
    DRAFTERS,
    Drafter,
    Fields,
    HeadShape,
    KnownDrafter,
    Sign,
    drafts_in_one_pass,
    register,
)
from sequoia_vllm.hardware.model_config import read_shape
from sequoia_vllm.library.pair_key import PairKey

ECHO = {
    "architectures": ["EchoDraftModel"], "model_type": "llama", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
    "echo_levels": 3,
}  # fmt: skip


class Echo(Drafter):
    """A kind that the package does not have."""

    kind = "echo"
    name = "an Echo head"
    rank = 0
    method = "eagle3"
    on_v2 = "tests.unit.test_drafter_registry.NoDrafter"
    in_one_pass = True
    signs = (Sign("architecture", r"Echo.*"), Sign("field", "echo_levels"))
    known = (KnownDrafter(r"a/target", "a/echo", "a paper"),)

    def levels(self, config: Fields) -> int | None:
        return config.value("echo_levels")

    def head_shape(self, config: Fields) -> HeadShape:
        return HeadShape(kind=self.kind, reads=config.count("hidden_size"), levels=3)


class NoDrafter:
    """It drafts no trees."""


@pytest.fixture(autouse=True)
def as_before():
    """Takes back what a test registers."""
    before = dict(DRAFTERS)
    yield
    DRAFTERS.clear()
    DRAFTERS.update(before)


@pytest.fixture
def echo():
    register(Echo)


def test_the_package_has_a_folder_for_each_kind():
    assert list(DRAFTERS) == ["dspark", "dflash", "eagle3", "mtp", "model", "lookup"]
    folders = {type(kind).__module__.rpartition(".")[2] for kind in DRAFTERS.values()}
    assert folders == set(DRAFTERS)


def names_in(file: Path) -> Iterator[str]:
    """Names of modules and attributes, and whole strings, of a file's code."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        for found in (getattr(node, field, None) for field in ("value", "id", "attr", "name")):
            if isinstance(found, str):
                yield from (found, found.removeprefix("use_"))


def test_nothing_else_knows_a_kind_by_its_name():
    """But for "model", which is also a key of the configuration, and the default; and "lookup",
    which is also what adaptation calls drafts by batch size.
    """
    package = Path(sequoia_vllm.__file__).parent
    names = {
        str(file): set(names_in(file)) & DRAFTERS.keys() - {"model", "lookup"}
        for file in package.rglob("*.py")
        if file.parent.parent != package / "drafters" or file.parent.name not in DRAFTERS
    }
    assert len(names) > 190
    assert {file: kinds for file, kinds in names.items() if kinds} == {}


@pytest.mark.usefixtures("echo")
def test_one_registration_makes_a_kind_recognised():
    for config in (ECHO, {key: value for key, value in ECHO.items() if key != "architectures"}):
        found = recognise(Fields(config), lambda: "llama")
        assert (found.kind, found.name) == ("echo", "an Echo head")
    assert SequoiaConfig.parse({"method": "sequoia", "drafter": "echo"}).drafter == "echo"
    shape = read_shape(ECHO, "a/echo", kind="echo")
    assert drafts_in_one_pass(shape.head)
    assert (shape.head.levels, shape.reading_parameters) == (3, 64 * 64)


@pytest.mark.usefixtures("echo")
def test_one_registration_makes_a_kind_drafted_with():
    pytest.importorskip("vllm")
    from sequoia_vllm.engine.frontend.draft_choice import find_draft
    from sequoia_vllm.engine.frontend.drafts import drafted_levels
    from tests.support.plans import planned

    own = DRAFTERS["echo"]
    found = find_draft(SequoiaConfig(), "a/target", list(DRAFTERS.values()), lambda name: own)
    assert found == ("a/echo", own)
    assert drafted_levels(SimpleNamespace(**ECHO)) == 3
    pair = PairKey("NVIDIA H200", "a/target", "a/echo", "bfloat16")
    fits, deep = (SequoiaConfig(tree={"size": 8, "depth": depth}).loaded() for depth in (3, 4))
    assert planned(fits, pair, "echo", levels=3).settings.drafter == "echo"
    with pytest.raises(ConfigError, match="the Echo head 'a/echo' drafts 3 at most"):
        planned(deep, pair, "echo", levels=3)


@pytest.mark.usefixtures("echo")
def test_one_registration_selects_the_drafter():
    pytest.importorskip("vllm")
    from sequoia_vllm.engine.common.settings import SequoiaSettings
    from sequoia_vllm.engine.v2 import runner
    from sequoia_vllm.tree import TokenTree

    draft = SimpleNamespace(architectures=["EchoDraftModel"])
    config = SimpleNamespace(draft_model_config=draft)
    SequoiaSettings(TokenTree.chain(2), "a test", None, {}, drafter="echo").store(config)
    own = SimpleNamespace(speculative_config=config)
    with pytest.raises(
        TypeError, match="NoDrafter, which drafts with an Echo head, is not a TreeDrafter"
    ):
        runner.new_proposer(None, None, None, own, None, None)


@pytest.mark.parametrize("kind", DRAFTERS.values(), ids=DRAFTERS)
def test_what_runs_each_kind_is_there(kind):
    pytest.importorskip("vllm")
    from sequoia_vllm.engine.v1.proposer import DrafterV1, TextDrafterV1
    from sequoia_vllm.engine.v2.drafting.drafter import TreeDrafter

    for path in (kind.on_v2, *kind.on_v2_by_architecture.values()):
        assert issubclass(resolve_name(path), TreeDrafter)
    own = DrafterV1 if kind.has_weights else TextDrafterV1
    assert kind.is_head or issubclass(resolve_name(kind.on_v1), own)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"levles": 3}, "drafter Odd: the engine asks for no levles (did you mean levels?)"),
        ({"levels": 3}, "levels is no method of (self, config)"),
        ({"problem": lambda self: None}, "problem is no method of (self, config)"),
        ({"kind": "eagle3"}, "there is a kind 'eagle3' already"),
        ({"on_v2": "NoDrafter"}, "'NoDrafter' is no dotted path of a class"),
        ({"name": "Echo"}, "the name 'Echo' has no article"),
        ({"is_head": False}, "only heads draft in one pass or are the target's own"),
    ],
)
def test_classes_that_do_not_fit_are_refused(changes, problem):
    before = dict(DRAFTERS)
    with pytest.raises(TypeError, match=re.escape(problem)):
        register(type("Odd", (Echo,), changes))
    with pytest.raises(TypeError, match="method is missing; name is missing; on_v2 is missing"):
        register(type("Bare", (Drafter,), {"kind": "bare", "rank": 1}))
    assert before == DRAFTERS
