"""Tiny random models whose attention or feed-forward layers are not those of Llama."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from tests.support.models import SMALL

VOCABULARY = 96
_WINDOW = 40
_COMMON = {
    **SMALL, "vocab_size": VOCABULARY, "num_hidden_layers": 4, "max_position_embeddings": 1024,
    "pad_token_id": 2,
}  # fmt: skip
_EVERY_OTHER = ["sliding_attention", "full_attention"] * 2
CONFIGS = {
    # Every layer has the window.
    "mistral": MistralConfig(**_COMMON, sliding_window=_WINDOW),
    # Every other layer has it, and all cap their scores.
    "gemma2": Gemma2Config(
        **_COMMON, sliding_window=_WINDOW, layer_types=_EVERY_OTHER, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=32,
    ),
    "gemma3": Gemma3TextConfig(
        **_COMMON, sliding_window=_WINDOW, layer_types=_EVERY_OTHER, query_pre_attn_scalar=32
    ),
    # The last two layers read the keys and values of the two before them.
    "gemma3n": Gemma3nTextConfig(
        **_COMMON, sliding_window=_WINDOW, layer_types=_EVERY_OTHER, num_kv_shared_layers=2,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCABULARY, laurel_rank=8,
        altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4,
    ),
    # Heads of two sizes, and embeddings of each layer.
    "gemma4": Gemma4TextConfig(
        **_COMMON, sliding_window=_WINDOW, layer_types=_EVERY_OTHER, global_head_dim=512,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCABULARY,
    ),
    # A window in every other layer, sinks in all, and experts.
    "gpt_oss": GptOssConfig(
        **_COMMON, sliding_window=_WINDOW, layer_types=_EVERY_OTHER, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    # Chunks of 32 tokens, then a layer without RoPE, which sees all, with experts.
    "llama4": Llama4TextConfig(
        **_COMMON | {"num_hidden_layers": 2}, intermediate_size_mlp=128, no_rope_layers=[1, 0],
        attention_chunk_size=32, floor_scale=16, interleave_moe_layer_step=2, moe_layers=[1],
        num_local_experts=4, layer_types=["chunked_attention", "full_attention"],
    ),
    "mixtral": MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}  # fmt: skip


def save_architecture(
    path: Path,
    name: str,
    layers: int | None = None,
    full: Sequence[int] | None = None,
    noise: float = 0.0,
) -> Path:
    """A random model of ``CONFIGS[name]`` whose choices depend on far and near tokens.

    `layers`: the first so many of its layers alone; `full`: those of them without a window;
    `noise`: share of noise in its matrices, which are those of the model without it else.
    """
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[name])
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    if full is not None:
        kinds = "sliding_attention", "full_attention"
        config.layer_types = [kinds[i in full] for i in range(config.num_hidden_layers)]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    noisy = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
                parameter += 0.15 * noise * torch.randn(parameter.shape, generator=noisy)
            elif parameter_name.endswith("sinks"):
                parameter.normal_(0, 2.0)
        if name.startswith("gemma"):
            _vary(model)
        if name == "llama4":  # knows a little that after a token comes the next one
            tokens = model.get_input_embeddings().weight.normal_(0, 2.0)
            model.lm_head.weight.add_(0.03 * tokens.roll(1, 0))
    model.save_pretrained(path)
    return path


def _vary(model: Any) -> None:
    """Makes a random Gemma say more than one token.

    A token's embedding is its head's row, too, and outweighs all layers. So they get more weight,
    scores reach the soft cap, and the head takes what is least like the last token.
    """
    for name, parameter in model.named_parameters():
        if name == "model.norm.weight":
            parameter.fill_(-2.0)
        elif "post_" in name:
            parameter.fill_(1.0)
        elif "q_proj" in name or "k_proj" in name:
            parameter.mul_(3.0)
