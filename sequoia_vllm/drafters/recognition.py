"""Recognises the kind of a drafter by its checkpoint's configuration."""

import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sequoia_vllm.drafters.registry import DRAFTERS, Drafter, DrafterKind, Fields, Sign, drafter


@dataclass(frozen=True)
class Recognised:
    """What a configuration says of a drafter."""

    kind: DrafterKind | None  # none: trees do not draft with it
    name: str  # the drafter in words, with an article
    sign: str | None = None  # the sign of it; None: no sign that it is more than a model
    method: str | None = None  # vLLM's own for it where trees do not draft with it, see `Sign`


def recognise(config: Fields, read_as: Callable[[], str | None]) -> Recognised:
    """Recognises a drafter by its architecture, then by its model type, then by a field.

    Args:
        config: Configuration of the checkpoint. Name and path do not matter.
        read_as: Returns the model type that vLLM reads the configuration as. It is called only
            where no architecture tells.
    """
    model_type = config.value("model_type")
    for name in config.value("architectures") or ():
        for kind, sign in _signs("architecture"):
            is_type = sign.model_type in (None, model_type)
            if is_type and re.fullmatch(sign.pattern, name):
                return _recognised(kind, sign, f"its architecture is {name}", config)
    read = read_as()
    for kind, sign in _signs("model_type"):
        if read is not None and re.fullmatch(sign.pattern, read):
            return _recognised(kind, sign, f"its model_type is {model_type}", config)
    for kind, sign in _signs("field"):
        if config.value(sign.pattern) is not None:
            return _recognised(kind, sign, f"it has {sign.pattern}", config)
    return Recognised("model", drafter("model").name)


def _signs(place: str) -> Iterator[tuple[Drafter, Sign]]:
    """The signs in one part of a configuration, in the order in which they are tried."""
    for kind in DRAFTERS.values():
        for sign in kind.signs:
            if sign.place == place:
                yield kind, sign


def _recognised(kind: Drafter, sign: Sign, said: str, config: Fields) -> Recognised:
    if sign.drafts and sign.name is None and (other := kind.look_alike(config)):
        sign, field = other
        said = f"it has {field}"
    return Recognised(
        kind.kind if sign.drafts else None, sign.name or kind.name, said,
        None if sign.drafts else sign.chains,
    )  # fmt: skip


def target_differences(head: Fields, target: Fields) -> list[str]:
    """Lists how a head's configuration describes its target differently from this target.

    Returns:
        The differences in words; empty if the head may have been made for it.
    """
    width = head.value("target_hidden_size")
    compared = (
        ("hidden size", head.value("hidden_size") if width is None else width, "hidden_size", ""),
        ("vocabulary", head.value("vocab_size"), "vocab_size", " tokens"),
        ("number of layers", head.value("num_target_layers"), "num_hidden_layers", ""),
    )
    differences = [
        f"its target's {what} is {of_head:,}{unit}, and this one's {target.count(key):,}{unit}"
        for what, of_head, key, unit in compared
        if of_head is not None and of_head != target.count(key)
    ]
    highest, layers = max(head.hidden_state_layers(), default=0), target.count("num_hidden_layers")
    if highest > layers:
        differences.append(
            f"it reads the hidden states of layer {highest}, and the target has {layers} layers"
        )
    return differences


# The head's own class, and fields that describe something else than the head.
_LEFT_OUT = frozenset({
    "architectures", "model_type", "speculators_config", "transformer_layer_config",
})  # fmt: skip


def without_format(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration as vLLM reads it: converted if it has vllm-project/speculators' format."""
    found = config.get("speculators_model_type")
    if found is None:
        return config
    own = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    if layers := own.get("aux_hidden_state_layer_ids"):
        own["eagle_aux_hidden_state_layer_ids"] = layers
    own.setdefault("sample_from_anchor", False)
    known = ChainMap(*(dict(kind.speculators) for kind in DRAFTERS.values()))
    own["architectures"] = [known.get(found, found)]
    return {**(config.get("transformer_layer_config") or {}), **own}
