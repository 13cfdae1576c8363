"""Heads in the format of vllm-project/speculators: the same fields as others have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ARCHITECTURES = {
    "eagle3": "Eagle3LlamaForCausalLM",
    "peagle": "PeagleLlamaForCausalLM",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}
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
    of_kind: dict[str, Any] = {"architectures": [_ARCHITECTURES.get(found, found)]}
    own.setdefault("sample_from_anchor", False)
    if found.startswith("dflash"):
        of_kind["dflash_config"] = {"sample_from_anchor": own["sample_from_anchor"]}
    return {**(config.get("transformer_layer_config") or {}), **own, **of_kind}
