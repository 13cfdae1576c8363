"""Tiny random models of vLLM's classes: a loader makes up the weights of a configuration.

So no checkpoint is needed: only vLLM's class and what its configuration says.
"""

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models import registry

from sequoia_vllm.hardware.support import kinds_of, refused_kinds
from tests.support.engines import lookup_trees, whole_trees
from tests.support.family_recipes import COMMON, MULTIMODAL, RECIPES
from tests.support.models import save_config

# vLLM looks at each class in a process of its own, lest it finds a GPU: 8 seconds, and none here.
registry._run_in_subprocess = lambda inspect: inspect()


def _route_alone(self: CPURouter, *args: Any, **kwargs: Any) -> Any:
    """Test only: sigmoid scores without groups, as of one group. vLLM's CPUs know groups alone."""
    if self.scoring_func == "sigmoid" and self.custom_routing_function is None:
        self.num_expert_group, self.topk_group = self.num_expert_group or 1, self.topk_group or 1
        self.use_grouped_topk = True
    return _route(self, *args, **kwargs)


_route, CPURouter._compute_routing = CPURouter._compute_routing, _route_alone


class _Fields(dict):  # type: ignore[type-arg]
    """A part of a configuration whose fields are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class _OwnConfig(PreTrainedConfig):
    """Stands for the class that a checkpoint brings along: it says its fields, and no more."""

    def __post_init__(self, **fields: Any) -> None:
        if "block_configs" in fields:
            text = json.dumps(fields["block_configs"])
            fields["block_configs"] = json.loads(text, object_hook=_Fields)
        super().__post_init__(**fields)


for _name in (
    "bailing_moe",
    "bailing_moe_v2",
    "nemotron-nas",
    "plamo3",
    "minicpm",
    "ernie4_5_moe_vl",
    "internlm2",
    "internlm3",
    "exaone",
    "deepseek",
    "telechat3",
    "sarvam_moe",
    "iquestloopcoder",
):
    AutoConfig.register(_name, type(_name, (_OwnConfig,), {"model_type": _name}))

# vLLM's Transformers backend gives a draft's experts the names of the target's, and refuses both.
# Checkpoints of Step 3.5 are refused as drafts by their type: theirs have MTP layers. InternLM2
# asks for an argument that nobody gives drafts.
_NO_DRAFTS = {
    "HunYuanMoEV1ForCausalLM", "MellumForCausalLM", "Step3p5ForCausalLM", "InternLM2ForCausalLM",
    *MULTIMODAL,
}  # fmt: skip
OPTIONS = {"skip_tokenizer_init": True, "block_size": 32, "load_format": "made up"}
"""Of the engines that run them."""


def save_family(folder: Path, name: str) -> tuple[str, dict[str, Any]]:
    """Saves the configuration of a target of this class, and of its draft: the same, with noise.

    Returns the target's folder and how to speculate: without a draft if the class is refused as
    one.
    """
    recipe = (RECIPES | MULTIMODAL)[name]
    common = {} if any(field.endswith("_config") for field in recipe) else COMMON
    fields = {**common, "architectures": [name], **recipe}
    config = {field: value for field, value in fields.items() if value is not None}
    target, draft = (save_config(folder / role, config) for role in ("target", "draft"))
    if name in _NO_DRAFTS or refused_kinds("draft", kinds_of(config)):
        return target, lookup_trees(size=16, depth=4)
    return target, whole_trees(16, draft=draft)


@register_model_loader("made up")
class MadeUpWeights(BaseModelLoader):
    """Random weights, which a parameter's name decides: a draft's are a target's with noise.

    Norms stay near what vLLM makes of them. All else is large enough that choices depend on far and
    near tokens.
    """

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Overwrites all parameters of a model in float32."""
        noise = 0.02 * (Path(model_config.model).name == "draft")
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            values, other = torch.randn(2, *parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.data.copy_(0.15 * values + noise * other)
            elif "bias" in name or "sinks" in name:
                parameter.data.copy_(0.3 * values)
            else:
                parameter.data.add_(0.1 * values)
