"""Layers of multi-token prediction (MTP) in a target's own checkpoint."""

import re
from collections.abc import Mapping
from typing import Any

from sequoia_vllm.drafters.registry import Drafter, Fields, HeadShape, Sign, register

MODEL_TYPES = r".*mtp"
"""Model types that vLLM reads such layers as."""
HY4 = "HYV4MTPModel"  # its heads have sinks
SPARSE = frozenset({"DeepseekV32MTPModel", HY4})
"""Architectures whose layer chooses the tokens that it attends to. It drafts without its choice."""
ARCHITECTURES = SPARSE | {
    "MiMoMTPModel", "Glm4MoeMTPModel", "ErnieMTPModel", "HYV3MTPModel", "ExaoneMoeMTP",
    "Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP", "DeepSeekMTPModel", "Glm4MoeLiteMTPModel",
    "MiMoV2MTPModel", "LongCatFlashMTPModel", "NemotronHMTPModel", "BailingMoeV25MTPModel",
    "BailingMoeV3MTPModel", "KimiK3MTPModel", "GlmOcrMTPModel",
}  # fmt: skip
"""Architectures of such layers that take one state of the target and give one back, and attend with
keys and values, or with latents (MLA); of hybrid targets, too. vLLM's registry has others: with
recurrent layers, several layers that take turns, or states of other widths.
"""
_TARGETS = re.compile(
    r"(MiMo(V2(Flash)?)?|Glm(Ocr|4Moe(Lite)?)|Ernie4_5_Moe|HYV3|ExaoneMoe|Qwen3Next|Qwen3_5(Moe)?|"
    r"InternS2Preview|DeepseekV3(2)?|GlmMoeDsa|HYV4|LongcatFlash|NemotronH|KimiK3|"
    r"BailingMoeV(2_5|3))"
    r"For(CausalLM|ConditionalGeneration)"
)
_OWN_WEIGHT = re.compile(r"(?:^|\.)mtp[._]")
_WEIGHT_OF_LAYER = re.compile(r"(?:^|\.)(?:language_)?model\.layers\.(\d+)\.")
# As vLLM's classes read configurations, by the names of targets and of layers.
_ONE_IF_UNSAID = re.compile(r"(Qwen3(Next|_5)|MiMoV2|Long[Cc]atFlash).*")


@register
class MTPLayer(Drafter):
    """A layer that reads the target's last states, and tokens, in a pass for each level."""

    kind = "mtp"
    name = "a multi-token prediction (MTP) layer"
    rank = 4
    ran_on = None
    method = "mtp"
    on_v2 = "sequoia_vllm.drafters.mtp.v2.LayerDrafter"
    is_targets_own = True
    layers = 1
    signs = (  # of checkpoints that are given as a draft
        Sign("architecture", r".*MTP.*", drafts=False, chains="mtp"),
        Sign(
            "model_type", MODEL_TYPES, "a model with multi-token prediction (MTP) layers",
            drafts=False, chains="mtp",
        ),
    )  # fmt: skip

    def target_problem(self, target: Any, layers: Any) -> str | None:
        """See `Drafter.target_problem`."""
        if not re.fullmatch(MODEL_TYPES, layers.model_type):
            return "has no layer of multi-token prediction (MTP) that vLLM knows"
        architecture = layers.architectures[0]
        if architecture not in ARCHITECTURES:
            return f"has MTP layers of a kind that trees do not draft with ({architecture})"
        number = getattr(layers, "n_predict", None)
        if number is None:
            number = getattr(layers.get_text_config(), "num_nextn_predict_layers", None)
        if number is None:
            number = int(bool(_ONE_IF_UNSAID.fullmatch(architecture)))
        if number != 1:
            return (
                f"has {number} MTP layers, which vLLM's chains take in turn, and trees draft with "
                "one that is used at every depth"
            )
        return None

    def lies_in(self, target: Mapping[str, Any]) -> bool:
        """See `Drafter.lies_in`."""
        [name, *_] = target.get("architectures") or [""]
        text = target.get("text_config") or target
        stated = text.get("num_nextn_predict_layers", target.get("num_nextn_predict_layers"))
        number = text.get("mtp_num_hidden_layers", stated)
        is_one = number == 1 or (number is None and _ONE_IF_UNSAID.fullmatch(name))
        return bool(is_one and _TARGETS.fullmatch(name))

    def is_own_weight(self, name: str, layers: int) -> bool:
        """See `Drafter.is_own_weight`; GLM and Hunyuan count it as the layer after the last."""
        found = _WEIGHT_OF_LAYER.search(name)
        is_after_last = found is not None and int(found[1]) >= layers
        return is_after_last or _OWN_WEIGHT.search(name) is not None

    def head_shape(self, config: Fields) -> HeadShape:
        """See `Drafter.head_shape`; the output matrix is the target's."""
        return HeadShape(kind=self.kind, reads=0)

    def input_parameters(self, shape: Any) -> int:
        """See `Drafter.input_parameters`; a matrix makes one vector of two before the layer."""
        return 2 * shape.hidden * shape.hidden
