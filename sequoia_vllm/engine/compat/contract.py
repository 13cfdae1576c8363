"""Start-up check that this vLLM has the surface that we override, as we know it."""

import importlib
import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

from sequoia_vllm.engine.compat.ledger import Expected, Signature, place
from sequoia_vllm.engine.compat.versions import (
    CHANGED,
    DISTRIBUTIONS,
    SUPPORTED_VERSIONS,
    Device,
    release,
    vllm_version,
)
from sequoia_vllm.errors import SequoiaError

OF_MODELS = "vllm.models."
"""Packages of whole models. To import one takes seconds, and brings what others need not have. What
we expect of them is checked where such a model is loaded."""


class ContractError(SequoiaError, RuntimeError):
    """This vLLM is not one that the plugin fits."""


def contract(device: Device, v2: bool = False, version: str | None = None) -> tuple[Expected, ...]:
    """What we expect of vLLM there; on GPUs it always runs Model Runner ``v2``."""
    if device == "gpu":
        runner = (*place("v2"), *place("gpu"), *CHANGED)
    else:
        runner = (*place("cpu_v1"), *(place("v2") if v2 else ()))
    found = release(version or vllm_version())
    entries = {entry.path: entry for entry in (*place("everywhere"), *runner) if entry.is_of(found)}
    return tuple(entries.values())


def current_device() -> Device:
    """Where this process's engine runs."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else "gpu"


def differences(expectations: Iterable[Expected]) -> list[str]:
    """How this vLLM differs from what we expect; empty if it fits."""
    found = []
    for expected in expectations:
        try:
            attribute = _resolve(expected.path)
        except (ImportError, AttributeError) as error:
            found.append(f"{expected.path} is missing ({error})")
            continue
        if expected.parameters is None:
            continue
        if difference := expected.difference(_signature(attribute)):
            found.append(difference)
    return found


@cache
def check_contract(v2: bool = False) -> None:
    """Checks vLLM once per process; on a CPU only the worker knows whether Model Runner V2 runs.

    Raises:
        ContractError: It differs; the message has every difference and the versions we support.
    """
    _check(one for one in contract(current_device(), v2) if not one.path.startswith(OF_MODELS))


def check_model(package: str) -> None:
    """Checks one of the packages in `OF_MODELS`, by its name; raises like `check_contract`."""
    of_model = f"{OF_MODELS}{package}."
    _check(one for one in contract(current_device(), v2=True) if one.path.startswith(of_model))


def _check(expectations: Iterable[Expected]) -> None:
    device = current_device()
    if found := differences(expectations):
        versions = SUPPORTED_VERSIONS[device]
        raise ContractError(
            f"this sequoia-vllm supports vLLM {' and '.join(versions)} on {device.upper()}s; the "
            f"installed one ({vllm_version() or 'unknown version'}) differs in:\n  "
            + "\n  ".join(found)
            + f"\nInstall a supported version (pip install '{DISTRIBUTIONS[device]}=="
            f"{versions[-1]}'), or a sequoia-vllm made for yours."
        )


def _resolve(path: str) -> Any:
    """The attribute; for a field of a dataclass without a default, what describes it."""
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attributes.split("."):
        fields = getattr(found, "__dataclass_fields__", {})
        found = fields[name] if name in fields else getattr(found, name)
    return found


def _signature(attribute: Any) -> Signature:
    parameters = inspect.signature(attribute).parameters.values()
    return Signature(
        names=tuple(parameter.name for parameter in parameters),
        required=frozenset(
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ),
    )
