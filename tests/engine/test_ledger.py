"""The ledger, written by reading sources, has all that is replaced in the classes as imported."""

import importlib
import inspect
import json

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.spec_decode.metrics import SpecDecodingProm

from sequoia_vllm import plugin
from sequoia_vllm.engine import hooks
from sequoia_vllm.engine.compat.ledger import LEDGER
from tests.contract.used import MODULES, Module

PATCHED = (
    EngineArgs, SamplingParams, StatLoggerManager, LLMEngine, SpeculativeConfig, SpecDecodingProm,
    VllmConfig, EngineCore, Platform, AsyncLLM,
)  # fmt: skip


REPLACED = json.loads(LEDGER.read_text())["replaced"]


def our_subclasses() -> list[type]:
    """Every class of the engine's that derives from one of vLLM's."""
    classes = {
        member
        for module in [importlib.import_module(Module(file).name) for file in MODULES]
        for member in vars(module).values()
        if inspect.isclass(member) and member.__module__ == module.__name__
    }
    return [ours for ours in classes if classes_of(ours, "vllm")]


def classes_of(of: type, package: str) -> list[type]:
    """The class and its bases, as far as they are from this package."""
    return [base for base in of.__mro__ if base.__module__.partition(".")[0] == package]


def overridden(ours: type) -> set[str]:
    """``module:Class.attribute`` of what it has in the place of vLLM's."""
    own = {name for base in classes_of(ours, "sequoia_vllm") for name in vars(base)}
    found = set()
    for name in own:
        owner = next((base for base in classes_of(ours, "vllm") if name in vars(base)), None)
        if owner is not None and not name.startswith(("__", "_abc_")):
            found.add(f"{owner.__module__}:{owner.__qualname__}.{name}")
    return found


def test_ledger_lists_every_overridden_attribute_and_no_other():
    found = set().union(*map(overridden, our_subclasses()))
    assert found == {path for path, one in REPLACED.items() if one["how"] == "subclass"}


def function_of(attribute: object) -> object:
    """A property's, a static method's, or what is given."""
    return getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)


def test_ledger_lists_every_patch():
    plugin.register()
    patched = {
        f"{owner.__module__}:{owner.__qualname__}.{name}"
        for owner in PATCHED
        for name, found in vars(owner).items()
        if hasattr(function_of(found), hooks._ORIGINAL)
    }
    names = {path.partition(":")[2] for path, one in REPLACED.items() if one["how"] == "patch"}
    conditional = {"VllmConfig._limit_max_model_len_to_draft"}
    if hooks.counts_blocks_as_rows():
        conditional.add("VllmConfig._set_max_num_scheduled_tokens")
    assert {path.partition(":")[2] for path in patched} == names - conditional
