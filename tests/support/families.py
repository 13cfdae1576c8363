"""Configurations of model families as they are published, smaller."""

import re
from functools import cache
from pathlib import Path
from typing import Any

_SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 256,
}  # fmt: skip
_VISION = {"hidden_size": 32, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
_HYBRID = {
    **_SIZES, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
}  # fmt: skip

REFUSED: dict[str, dict[str, Any]] = {
    "voxtral-realtime": {
        "architectures": ["VoxtralRealtimeGeneration"], "text_config": _SIZES,
        "audio_config": {"hidden_size": 32},
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": {**_HYBRID, "num_experts": 8}, "vision_config": _VISION,
    },
    "qwen3.5-text": {
        **_HYBRID, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    },
    "deepseek": {
        **_SIZES, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "kv_lora_rank": 16, "n_routed_experts": 8,
    },
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
        "text_config": {**_SIZES, "attention_chunk_size": 8192}, "vision_config": _VISION,
    },
    "granite": {
        **_SIZES, "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba"] * 2,
    },
    "mpt": {**_SIZES, "architectures": ["MPTForCausalLM"], "attn_config": {"alibi": True}},
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True,
    },
    "reward": {**_SIZES, "architectures": ["Qwen2ForRewardModel"]},
}  # fmt: skip
"""Families that trees do not serve."""

READ_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": {**_SIZES, "model_type": "gemma3_text"}, "vision_config": _VISION,
    },
    "qwen2.5-vl": {
        **_SIZES, "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl", "vision_config": _VISION,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    },
}  # fmt: skip
"""Families that trees serve as targets, and not as drafts."""

KINDS = {
    "gemma3": {"multimodal"},
    "qwen2.5-vl": {"mrope", "multimodal"},
    "voxtral-realtime": {"realtime", "multimodal"},
    "qwen3.5": {"recurrent", "mrope", "multimodal"},
    "qwen3.5-text": {"recurrent", "mrope"},
    "deepseek": {"mla"},
    "llama4": {"chunked", "multimodal"},
    "granite": {"recurrent"},
    "mpt": {"alibi"},
    "whisper": {"multimodal", "encoder-decoder"},
    "reward": {"pooling"},
}
"""Their kinds, by `sequoia_vllm.hardware.support`."""

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
