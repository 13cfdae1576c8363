"""Configurations of tiny models of the families in docs/supported.md, by vLLM's classes."""

from typing import Any

from tests.support.latents import YARN
from tests.support.models import SMALL

VOCABULARY, WINDOW = 128, 40
COMMON = {
    **SMALL, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "intermediate_size": 96,
    "pad_token_id": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}  # fmt: skip
_BAILING = {
    "num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "use_bias": False, "use_qkv_bias": True, "embedding_dropout": 0.0, **_EXPERTS,
    "moe_shared_expert_intermediate_size": 48, "rope_parameters": _ROPE,
}  # fmt: skip
# Without YaRN vLLM 0.32 rotates queries wrongly on CPUs (`tests.support.latents`).
_LATENT = {
    "num_key_value_heads": 2, "head_dim": 64, "q_lora_rank": 16, "kv_lora_rank": 512,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "rope_parameters": YARN,
}  # fmt: skip
_DEEPSEEK = {
    **_LATENT, **_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip


def _text_of(kind: str, text: str, **fields: Any) -> dict[str, Any]:
    """A model that reads images or sounds; its text model is of the kind ``text``."""
    of_text = {**COMMON, "model_type": text, **fields}
    return {"model_type": kind, "tie_word_embeddings": False, "text_config": of_text}


_AXES = {"rope_parameters": {**_ROPE, "mrope_section": [4, 6, 6]}}
_HALF = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
_OF_TEXT = {"rope_parameters": _ROPE}

RECIPES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "Glm4ForCausalLM": {"model_type": "glm4", "partial_rotary_factor": 0.5},
    "GlmForCausalLM": {"model_type": "glm", "partial_rotary_factor": 0.5, "attention_bias": True},
    "MiniMaxM2ForCausalLM": {
        "model_type": "minimax_m2", "num_local_experts": 4, "rotary_dim": 16, **_EXPERTS,
        "scoring_func": "sigmoid", "use_routing_bias": True,
    },
    "SeedOssForCausalLM": {"model_type": "seed_oss", "attention_bias": True},
    "HunYuanDenseV1ForCausalLM": {"model_type": "hunyuan_v1_dense", "use_qk_norm": True},
    "Phi3ForCausalLM": {"model_type": "phi3"},
    "GraniteForCausalLM": {"model_type": "granite", **_GRANITE},
    "CohereForCausalLM": {"model_type": "cohere", "tie_word_embeddings": True},
    "Cohere2ForCausalLM": {"model_type": "cohere2", "tie_word_embeddings": True, **_WINDOWS},
    "Olmo2ForCausalLM": {"model_type": "olmo2"},
    "Olmo3ForCausalLM": {"model_type": "olmo3", **_WINDOWS},
    "OlmoeForCausalLM": {"model_type": "olmoe", "num_experts": 4, **_EXPERTS},
    "HunYuanMoEV1ForCausalLM": {
        "model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": 2, "use_qk_norm": True,
        "num_experts_per_tok": 2,
    },
    "PhiMoEForCausalLM": {
        "model_type": "phimoe", "num_local_experts": 4, "attention_bias": True,
        "lm_head_bias": True, **_EXPERTS,
    },
    "GraniteMoeForCausalLM": {
        "model_type": "granitemoe", "num_local_experts": 4, **_EXPERTS, **_GRANITE,
    },
    "GraniteMoeSharedForCausalLM": {
        "model_type": "granitemoeshared", "num_local_experts": 4, "shared_intermediate_size": 48,
        **_EXPERTS, **_GRANITE,
    },
    "Step3p5ForCausalLM": {
        "model_type": "step3p5", "num_attention_heads": 4, "num_attention_groups": 2,
        "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 48, "share_expert_dim": 48,
        "moe_layers_enum": "1", "moe_router_activation": "sigmoid", **_WINDOWS,
        "layer_types": ["full_attention", "sliding_attention"], "rope_theta": [10000.0, 500.0],
        "use_head_wise_attn_gate": True, "partial_rotary_factors": [0.5, 1.0],
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": 2,
            "num_attention_groups": 2, "head_dim": 32,
        },
    },
    "BailingMoeForCausalLM": {"model_type": "bailing_moe", **_BAILING},
    "BailingMoeV2ForCausalLM": {
        "model_type": "bailing_moe_v2", **_BAILING, "use_qk_norm": True, "use_rmsnorm": True,
        "partial_rotary_factor": 0.5, "n_group": 2, "topk_group": 1, "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "routed_scaling_factor": 1.5,
    },
    "DeciLMForCausalLM": {
        "model_type": "nemotron-nas", "num_hidden_layers": 4, "rope_parameters": _ROPE,
        "block_configs": [
            {
                "attention": {"n_heads_in_group": heads, "no_op": not heads},
                "ffn": {"ffn_mult": width, "no_op": not width},
            }
            for heads, width in ((2, 1.5), (None, 3.0), (2, 0.75), (2, None))
        ],
    },
    "LagunaForCausalLM": {
        "model_type": "laguna", "num_experts": 4, "shared_expert_intermediate_size": 48,
        "num_attention_heads_per_layer": [2, 4], "gating": True, **_EXPERTS, **_WINDOWS,
    },
    "AfmoeForCausalLM": {
        "model_type": "afmoe", "num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1,
        "mup_enabled": True, "score_func": "sigmoid", "route_norm": True, "n_group": 1,
        "topk_group": 1, **_EXPERTS, **_WINDOWS,
    },
    "Plamo3ForCausalLM": {
        "model_type": "plamo3", "rope_parameters": _ROPE, "rope_local_theta": 500.0, **_WINDOWS,
        "interleaved_sliding_window": [WINDOW, None],
    },
    "SmolLM3ForCausalLM": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "Starcoder2ForCausalLM": {"model_type": "starcoder2", "use_bias": True, "sliding_window": 40},
    "MellumForCausalLM": {"model_type": "mellum", "num_experts": 4, **_EXPERTS, **_WINDOWS},
    "MiniCPMForCausalLM": {
        "model_type": "minicpm", "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32,
        "rope_parameters": _ROPE,
    },
    "MiniCPM3ForCausalLM": {
        "model_type": "minicpm3", "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "scale_emb": 3,
        "scale_depth": 1.4, "dim_model_base": 32,
    },
    "DeepseekV3ForCausalLM": {"model_type": "kimi_k2", **_DEEPSEEK},
    "MistralLarge3ForCausalLM": {"model_type": "deepseek_v3", **_DEEPSEEK},
    "AXK1ForCausalLM": {"model_type": "axk1", **_DEEPSEEK},
    "Ministral3ForCausalLM": {
        "model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
    },
    "GemmaForCausalLM": {
        "model_type": "gemma", "tie_word_embeddings": True, "vocab_size": 512,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "ApertusForCausalLM": {"model_type": "apertus", "hidden_act": "xielu"},
    "Cohere2MoeForCausalLM": {
        "model_type": "cohere2_moe", "num_experts": 4, "tie_word_embeddings": True, **_EXPERTS,
        **_WINDOWS,
    },
    "FalconForCausalLM": {
        "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 1,
        "multi_query": True, "parallel_attn": True, "alibi": False, "bias": False, "head_dim": None,
    },
    "NemotronForCausalLM": {
        "model_type": "nemotron", "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
        "hidden_act": "relu2",
    },
    "StableLmForCausalLM": {
        "model_type": "stablelm", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
        "use_qkv_bias": True,
    },
    "Qwen2MoeForCausalLM": {
        "model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1, **_EXPERTS,
    },
    "GraniteSWAForCausalLM": {"model_type": "granite_swa", **_GRANITE, **_WINDOWS},
    "GraniteMoeSWAForCausalLM": {
        "model_type": "granitemoe_swa", "num_local_experts": 4, **_EXPERTS, **_GRANITE, **_WINDOWS,
    },
    "HyperCLOVAXForCausalLM": {"model_type": "hyperclovax", **_GRANITE},
    "InternLM2ForCausalLM": {"model_type": "internlm2", "bias": False, "rope_parameters": _ROPE},
    "InternLM3ForCausalLM": {
        "model_type": "internlm3", "bias": False, "qkv_bias": True, "rope_parameters": _ROPE,
    },
    "ExaoneForCausalLM": {
        "model_type": "exaone", "num_layers": 2, "layer_norm_epsilon": 1e-6,
        "activation_function": "silu", "rope_parameters": _ROPE,
    },
    "GPTJForCausalLM": {
        "model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16,
        "n_positions": 512,
    },
    "OPTForCausalLM": {
        "model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "hidden_act": None,
        "do_layer_norm_before": True, "activation_function": "relu",
    },
    "DeepseekForCausalLM": {
        "model_type": "deepseek", "n_routed_experts": 4, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True, **_EXPERTS,
        "rope_parameters": _ROPE,
    },
    "TeleChat3ForCausalLM": {"model_type": "telechat3", "rope_parameters": _ROPE},
    "SarvamMoEForCausalLM": {
        "model_type": "sarvam_moe", **_BAILING, "use_qk_norm": True, "n_group": 2, "topk_group": 1,
        "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "IQuestLoopCoderForCausalLM": {
        "model_type": "iquestloopcoder", "loop_num": 2, "loop_window_size": 16,
        "rope_parameters": _ROPE,
    },
    "DbrxForCausalLM": {
        "model_type": "dbrx", "d_model": 64, "n_heads": 2, "n_layers": 2, "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2,
            "ffn_act_fn": {"name": "silu"}, "moe_normalize_expert_weights": 1.0,
        },
    },
}  # fmt: skip
"""What ``config.json`` of a tiny model has besides `COMMON`, by vLLM's class."""

MULTIMODAL: dict[str, dict[str, Any]] = {
    "MuseGlimmerForConditionalGeneration": _text_of(
        "muse_glimmer", "muse_glimmer_text", no_rope_layers=[1, 0], output_multiplier=4.0,
        **_WINDOWS,
    ),
    "MuseGlimmerForCausalLM": {
        "model_type": "muse_glimmer_text", "no_rope_layers": [1, 0], **_WINDOWS,
        "output_multiplier": 4.0,
    },
    "Qwen2_5_VLForConditionalGeneration": _text_of("qwen2_5_vl", "qwen2_5_vl_text", **_AXES),
    "Glm4vForConditionalGeneration": _text_of("glm4v", "glm4v_text", rope_parameters=_HALF),
    "Glm4vMoeForConditionalGeneration": _text_of(
        "glm4v_moe", "glm4v_moe_text", n_routed_experts=4, use_qk_norm=True, rope_parameters=_HALF,
        **_EXPERTS,
    ),
    "GlmOcrForConditionalGeneration": _text_of("glm_ocr", "glm_ocr_text", rope_parameters=_HALF),
    "GlmAsrForConditionalGeneration": _text_of("glmasr", "llama", **_OF_TEXT),
    "PaddleOCRVLForConditionalGeneration": _text_of("paddleocr_vl", "paddleocr_vl_text", **_AXES),
    "Mistral3ForConditionalGeneration": _text_of(
        "mistral3", "ministral3", architectures=["MistralForCausalLM"], **_OF_TEXT
    ),
    "InternVLForConditionalGeneration": _text_of(
        "internvl", "qwen3", architectures=["Qwen3ForCausalLM"], **_OF_TEXT
    ),
    "Qwen3ASRForConditionalGeneration": {
        "model_type": "qwen3_asr",
        "thinker_config": _text_of("qwen3_asr_thinker", "qwen3_asr_text", **_AXES),
    },
    "MossTranscribeDiarizeForConditionalGeneration": _text_of(
        "moss_transcribe_diarize", "qwen3", architectures=["Qwen3ForCausalLM"], **_OF_TEXT
    ),
}  # fmt: skip
"""`RECIPES` of models that read images or sounds: the text model alone is made."""
