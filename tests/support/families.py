"""Configurations of model families, and what vLLM makes of them."""

import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sequoia_vllm.hardware.families import family_file
from sequoia_vllm.hardware.support import kinds_of, refused_kinds

CONFIGS: dict[str, dict[str, Any]] = {
    row.family: {**row.config, "architectures": [row.architectures[-1]]}
    for row in family_file().families
}
"""What tells the kind of model in a published configuration, by family."""

NAMES = {model.replace("*", ""): row for row in family_file().families for model in row.models}
"""The families of names on the Hub."""

REFUSED = {
    family: config
    for family, config in CONFIGS.items()
    if refused_kinds("target", kinds_of(config))
} | {
    "MPT": {"architectures": ["MPTForCausalLM"], "attn_config": {"alibi": True}},
    "reward": {"architectures": ["Qwen2ForRewardModel"]},
}
"""Configurations that trees do not serve."""

READ_IMAGES = {
    family: config
    for family, config in CONFIGS.items()
    if family not in REFUSED and "multimodal" in kinds_of(config)
}
"""Configurations that trees serve as targets, and not as drafts."""

CONFIGURATIONS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "configurations.json").read_text(encoding="utf-8")
)
"""What tests read of published models' configurations, by name."""

MIXTURES = {
    name: (CONFIGURATIONS[name], parameters, active)
    for name, parameters, active in (
        ("Qwen3-30B-A3B", 30.5e9, 3.0e9),
        ("Mixtral-8x7B", 46.7e9, 12.8e9),
        ("gpt-oss-20b", 20.9e9, 3.6e9),
        ("GLM-4.5-Air", 106.9e9, 12.8e9),
        ("Qwen3-Next-80B-A3B", 79.6e9, 3.5e9),
        ("DeepSeek-V2-Lite", 15.7e9, 2.45e9),
        ("DeepSeek-V3", 671e9, 37e9),
        ("ERNIE-4.5-21B-A3B", 21.8e9, 3.35e9),
    )
}
"""Mixtures of experts by name: configuration, all parameters, and those of a token (a pass's)."""

ZAMBA_2_7B = {
    "model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"], "hidden_size": 3584,
    "num_hidden_layers": 81, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 32, "attention_head_dim": 224, "attention_hidden_size": 7168,
    "vocab_size": 32000, "tie_word_embeddings": True, "num_mem_blocks": 2, "adapter_rank": 128,
    "mamba_d_state": 64, "mamba_headdim": 64, "mamba_ngroups": 2, "n_mamba_heads": 112,
    "mamba_expand": 2, "hybrid_layer_ids": [6, 11, *range(17, 78, 6)],
    "layers_block_type": [
        "hybrid" if i in (6, 11, *range(17, 78, 6)) else "mamba" for i in range(81)
    ],
}  # fmt: skip
"""Its configuration: 13 layers take turns with two blocks of attention and MLP."""

RECURRENT = frozenset({"IsHybrid", "HasInnerState", "IsAttentionFree"})
"""What vLLM's classes of models with recurrent layers derive from."""


@cache
def _bases_in_vllm() -> dict[str, set[str]]:
    """What the classes in vLLM's models derive from, read in its sources."""
    import vllm

    bases: dict[str, set[str]] = {}
    for folder in ("model_executor/models", "models"):
        for file in (Path(vllm.__file__).parent / folder).rglob("*.py"):
            found = re.findall(r"^class (\w+)\(([^:]*?)\):", file.read_text(), flags=re.MULTILINE)
            for name, listed in found:
                bases.setdefault(name, set()).update(re.findall(r"\w+", listed))
    return bases


def bases_in_vllm(name: str) -> set[str]:
    """What a class of vLLM's models derives from, with itself."""
    seen: set[str] = set()
    wanted = [name]
    while wanted:
        if (found := wanted.pop()) not in seen:
            seen.add(found)
            wanted += _bases_in_vllm().get(found, ())
    return seen


def in_vllm(config: dict[str, Any], name: str = "a/model") -> Any:
    """vLLM's own `ModelConfig`, of a checkpoint whose configuration has no more than this."""
    from vllm.config import ModelConfig
    from vllm.model_executor.models import registry
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    [architecture] = config["architectures"]
    config = {"is_encoder_decoder": False, **config}
    text = config.get("text_config", {})
    parts = SimpleNamespace(**config), SimpleNamespace(**config | text)
    parts[0].get_text_config = lambda: parts[1]
    known = registry.ModelRegistry.models.get(architecture)
    class_name = known.class_name if known else ""
    bases = bases_in_vllm(class_name)
    is_multimodal = architecture in registry._MULTIMODAL_MODELS or "MultiModal" in class_name
    model = ModelConfig.__new__(ModelConfig)
    vars(model).update(
        model=name, hf_config=parts[0], hf_text_config=parts[1],
        runner_type="pooling" if architecture in registry._REWARD_MODELS else "generate",
        _model_info=SimpleNamespace(
            is_attention_free="IsAttentionFree" in bases, is_hybrid="IsHybrid" in bases,
            has_inner_state="HasInnerState" in bases, architecture=architecture,
        ),
        model_arch_config=SimpleNamespace(
            architectures=[architecture],
            is_deepseek_mla=ModelArchConfigConvertorBase(*parts).is_deepseek_mla(),
        ),
        attention_chunk_size=text.get("attention_chunk_size"),
        multimodal_config=object() if is_multimodal else None,
        _get_transformers_backend_cls=lambda: None,
    )  # fmt: skip
    return model
