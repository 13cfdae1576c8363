"""Can trees draft with the layers of multi-token prediction (MTP) of a target's own checkpoint?"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, get_args

from vllm.config.speculative import MTPModelTypes, SpeculativeConfig

from sequoia_vllm.config import ConfigError

_DENSE = frozenset({"MiMoMTPModel"})
"""What vLLM loads such layers as that take one state of the target and give one back, attend with
keys and values, and are dense, as their targets are; others in its registry are layers of targets
that are none of it, or that are multimodal."""


def check_mtp_layers(target: Any) -> None:
    """Whether trees draft with them.

    Args:
        target: vLLM's configuration of the target.

    Raises:
        ConfigError: They do not, or there are none; names the fix.
    """
    if problem := _problem(target):
        raise ConfigError(
            f'"drafter": "mtp": {target.model} {problem}: give "model" an EAGLE-3 or DFlash head '
            "or a draft model that was made for it"
        )


def _problem(target: Any) -> str | None:
    layers = SpeculativeConfig.hf_config_override(deepcopy(target.hf_config))
    if layers.model_type not in get_args(MTPModelTypes):
        return "has no layer of multi-token prediction (MTP) that vLLM knows"
    refused = {
        "uses multi-head latent attention (MLA), which trees do not have": target.use_mla,
        "has recurrent (Mamba or linear-attention) layers, which trees cannot take back": (
            target.is_hybrid or target.has_inner_state
        ),
        "is multimodal, and so is what its MTP layer reads": target.is_multimodal_model,
        "is a mixture of experts, and trees draft with MTP layers of dense targets alone": (
            target.is_moe
        ),
    }
    if reason := next((reason for reason, found in refused.items() if found), None):
        return reason
    architecture = layers.architectures[0]
    if architecture not in _DENSE:
        return f"has MTP layers of a kind that trees do not draft with ({architecture})"
    number = getattr(layers, "num_nextn_predict_layers", None) or 0
    if number != 1:
        return f"has {number} MTP layers, and trees draft with one that is used at every depth"
    return None
