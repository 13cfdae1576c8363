"""The ledger lists every override of vLLM, and nothing else."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_args

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.spec_decode.metrics import SpecDecodingProm
from vllm.v1.structured_output import StructuredOutputManager

from sequoia_vllm import engine, plugin
from sequoia_vllm.engine import hooks
from sequoia_vllm.engine.compat import versions
from sequoia_vllm.engine.compat.ledger import OVERRIDES, Override
from sequoia_vllm.engine.compat.ledger.entry import Kind

PATCHED = (
    EngineArgs, SamplingParams, StructuredOutputManager, Scheduler, StatLoggerManager, LLMEngine,
    SpeculativeConfig, SpecDecodingProm, VllmConfig, EngineCore,
)  # fmt: skip


Place = tuple[object, str]  # an attribute: what has it, and its name


def listed(kind: str) -> list[Override]:
    return [override for override in OVERRIDES if override.kind == kind]


def place(path: str) -> Place:
    """``module:owner.attribute`` resolved as far as its owner."""
    module, _, attributes = path.partition(":")
    *owners, name = attributes.split(".")
    owner = importlib.import_module(module)
    for owner_name in owners:
        owner = getattr(owner, owner_name)
    return owner, name


def places(kind: str) -> set[Place]:
    return {place(override.path) for override in listed(kind)}


@cache
def our_modules():
    found = pkgutil.walk_packages(engine.__path__, f"{engine.__name__}.")
    return [importlib.import_module(module.name) for module in found]


def classes_of(of: type, package: str) -> list[type]:
    """The class and its bases, as far as they are from this package."""
    return [base for base in of.__mro__ if base.__module__.partition(".")[0] == package]


@cache
def our_subclasses() -> list[type]:
    """Every class of the engine's that derives from one of vLLM's."""
    classes = {
        member
        for module in our_modules()
        for member in vars(module).values()
        if inspect.isclass(member) and member.__module__ == module.__name__
    }
    return [ours for ours in classes if classes_of(ours, "vllm")]


def attributes(of: type) -> set[str]:
    """What a class defines, methods or not, but for what Python itself calls."""
    return {name for name in vars(of) if not name.startswith("__") and name != "_abc_impl"}


def our_attributes(of: type) -> set[str]:
    return set().union(*map(attributes, classes_of(of, "sequoia_vllm")))


def definition(of: type, name: str) -> Place | None:
    """The class of vLLM from which this one has the attribute; None: from none."""
    owner = next((base for base in classes_of(of, "vllm") if name in vars(base)), None)
    return None if owner is None else (owner, name)


def overridden() -> set[Place]:
    found = {definition(ours, name) for ours in our_subclasses() for name in our_attributes(ours)}
    return found - {None}


def test_ledger_lists_every_overridden_attribute():
    assert overridden() - {definition(*where) for where in places("subclass")} == set()


def test_every_listed_attribute_is_overridden():
    """Or is there for another version of vLLM, whose class has such an attribute."""
    set_by_us = {
        (base, name)
        for ours in our_subclasses()
        for base in classes_of(ours, "vllm")
        for name in our_attributes(ours)
    }
    assert places("subclass") - set_by_us == set()
    release = versions.release(versions.vllm_version())
    here = {
        definition(*place(override.path))
        for override in listed("subclass")
        if override.since is None or release >= override.since
    }
    assert here - overridden() == set()


@cache
def assigned(of: Callable[..., Any]) -> frozenset[tuple[str, ...]]:
    """Attributes that a function, or a class's methods, set on ``self``.

    ``("a", "b")`` for ``self.a.b = ...``.
    """
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(of)))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            names = [
                ast.unparse(part).split(".") for part in parts if isinstance(part, ast.Attribute)
            ]
            found |= {tuple(rest) for first, *rest in names if first == "self" and rest}
    return frozenset(found)


def replaced_on_instances() -> Iterator[str]:
    """``module:Class.attribute[.attribute]``, by the class of vLLM that sets the first."""
    own = {path[0] for ours in our_subclasses() for path in assigned(ours) if len(path) == 1}
    for ours in our_subclasses():
        for path in set().union(*map(assigned, classes_of(ours, "sequoia_vllm"))):
            owners = [base for base in classes_of(ours, "vllm") if path[:1] in assigned(base)]
            is_ours = len(path) > 1 and path[-1] in own  # of an object of ours
            if owners and not is_ours:
                yield f"{owners[0].__module__}:{owners[0].__name__}.{'.'.join(path)}"
    for owner, name in places("patch"):
        if not hasattr(owner, name):
            continue  # another version has it
        for path in assigned(replacement(owner, name)) & assigned(owner):
            yield f"{owner.__module__}:{owner.__name__}.{'.'.join(path)}"


def replacement(owner: object, name: str) -> Callable[..., Any]:
    """What of ours a patch calls in the place of this function of vLLM."""
    plugin.register()
    return inspect.getclosurevars(function_of(getattr(owner, name))).nonlocals["replacement"]


def test_ledger_lists_every_attribute_replaced_on_an_instance():
    assert set(replaced_on_instances()) == {override.path for override in listed("instance")}


def function_of(attribute: object) -> object:
    """A property's, or what is given."""
    return attribute.fget if isinstance(attribute, property) else attribute


def test_ledger_lists_every_patch():
    plugin.register()
    patched = {
        (owner, name)
        for owner in PATCHED
        for name in dir(owner)
        if hasattr(function_of(inspect.getattr_static(owner, name)), hooks._ORIGINAL)
        or hasattr(getattr(owner, name, None), hooks._ORIGINAL)
    }
    assert patched == {place for place in places("patch") if hasattr(*place)}
    assert inspect.getsource(hooks).count("    _wrap(") == len(listed("patch"))


def test_ledger_lists_every_swap():
    swaps = [
        (getattr(module, owner), name)
        for module in our_modules()
        for owner, name in re.findall(r"\bpatched\((\w+), \"(\w+)\"", inspect.getsource(module))
    ]
    assert len(set(swaps)) == len(swaps)
    assert set(swaps) == places("swap")
    source = "".join(map(inspect.getsource, our_modules()))
    assert len(re.findall(r"\bpatched\((?!\s*owner)", source)) == len(swaps)


def test_every_override_says_why_and_when_it_can_go():
    assert all(override.why and override.until for override in OVERRIDES)
    assert len({override.path for override in OVERRIDES}) == len(OVERRIDES)
    assert {override.kind for override in OVERRIDES} == set(get_args(Kind))


def test_only_what_instances_have_is_checked_elsewhere():
    elsewhere = [override for override in OVERRIDES if override.checked_at is not None]
    assert {override.kind for override in elsewhere} == {"instance"}
    unchecked = {override.kind for override in OVERRIDES if override.expected is None}
    assert unchecked == {"added_field", "instance"}
