"""Heads in the format of vllm-project/speculators: the same fields as others have."""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from sequoia_vllm.drafters.registry import DRAFTERS

# The head's own class, and fields that describe something else than the head.
_LEFT_OUT = frozenset({
    "architectures", "model_type", "speculators_config", "transformer_layer_config",
})  # fmt: skip


def without_format(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration as vLLM reads it: this format's converted, any other as it is."""
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
