"""Configurations of model families, and what vLLM makes of them."""

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

MIXTURES: dict[str, tuple[dict[str, Any], float, float]] = {
    "Qwen3-30B-A3B": ({
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "architectures": ["Qwen3MoeForCausalLM"],
    }, 30.5e9, 3.0e9),
    "Mixtral-8x7B": ({
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "architectures": ["MixtralForCausalLM"],
    }, 46.7e9, 12.8e9),
    "gpt-oss-20b": ({
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4,
        "architectures": ["GptOssForCausalLM"], "layer_types": ["full_attention"] * 24,
        "quantization_config": {"quant_method": "mxfp4"},
    }, 20.9e9, 3.6e9),
    "GLM-4.5-Air": ({
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151552, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "architectures": ["Glm4MoeForCausalLM"],
    }, 106.9e9, 12.8e9),
    "Qwen3-Next-80B-A3B": ({
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "vocab_size": 151936, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1, "architectures": ["Qwen3NextForCausalLM"],
    }, 79.6e9, 3.5e9),
    "DeepSeek-V2-Lite": ({
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 102400, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "architectures": ["DeepseekV2ForCausalLM"],
    }, 15.7e9, 2.45e9),
    "DeepSeek-V3": ({
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "vocab_size": 129280, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "architectures": ["DeepseekV3ForCausalLM"],
    }, 671e9, 37e9),
    "ERNIE-4.5-21B-A3B": ({
        "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
        "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
        "vocab_size": 103424, "tie_word_embeddings": True, "moe_num_experts": 64, "moe_k": 6,
        "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": 27, "moe_layer_interval": 1,
        "architectures": ["Ernie4_5_MoeForCausalLM"],
    }, 21.8e9, 3.35e9),
}  # fmt: skip
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
