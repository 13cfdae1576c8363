"""Trained heads for the tests, and tiny ones that are not trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from tests.support.models import MODELS, SMALL

EAGLE3, DFLASH = (str(MODELS / kind) for kind in ("eagle3", "dflash"))


def save_eagle3(directory: Path, target: str, tokens: list[int], scale: float = 1.0) -> str:
    """An EAGLE-3 head for this target, with random weights; it reads layers 1 and 2.

    Args:
        tokens: The target's tokens that it may draft, ascending.
        scale: Of its LM head's: how sure it is of what it drafts.
    """
    config, random, layers = as_the_target(target), random_matrices(0), [1, 2]
    hidden = config["hidden_size"]
    weights = {
        "fc.weight": random(hidden, len(layers) * hidden),
        **_layer(random, config, "midlayer", read=2 * hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": scale * random(len(tokens), hidden),
        "d2t": torch.tensor(tokens) - torch.arange(len(tokens)),
    }
    own = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "draft_vocab_size": len(tokens), "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }  # fmt: skip
    return save_head(directory, {**config, **own}, weights)


def save_dflash(
    directory: Path, target: str, scale: float = 1.0, layers: int = 1, **own: Any
) -> str:
    """A DFlash head for this target, with random weights; blocks of 8, mask token 0."""
    config, weights = dflash_parts(target, scale, layers)
    return save_head(directory, {**config, **own}, weights)


def dflash_parts(
    target: str, scale: float = 1.0, layers: int = 1
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and weights of a DFlash head, as `save_dflash`."""
    config, random = as_the_target(target), random_matrices(0)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    weights = {
        "fc.weight": random(hidden, hidden),
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.full((hidden,), scale),
    }
    for name in (f"layers.{index}" for index in range(layers)):
        weights |= _layer(random, config, name, read=hidden)
        weights |= {f"{name}.self_attn.{n}_norm.weight": torch.ones(head_dim) for n in "qk"}
    own = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": layers,
        "block_size": 8, "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
    }  # fmt: skip
    return {**config, **own}, weights


_AS_THE_TARGET = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "rope_theta", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def save_mimo(directory: Path, vocab: int = 256) -> str:
    """A tiny MiMo target with one layer of multi-token prediction (MTP), with random weights.

    Layers add less than the token's embedding, which target and MTP layer have in common. Both know
    a little that after a token comes the next one.
    """
    config = {
        **SMALL, "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "vocab_size": vocab,
        "num_hidden_layers": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "use_sliding_window": False, "num_nextn_predict_layers": 1,
        "torch_dtype": "float32",
    }  # fmt: skip
    hidden, noise, random = config["hidden_size"], 0.8, random_matrices(7)

    def layer(prefix: str) -> dict[str, torch.Tensor]:
        made = _layer(random, config, prefix, read=hidden)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            made[f"{prefix}.{name}.weight"] *= noise
        biased = [f"{prefix}.self_attn.{n}_proj" for n in "qkv"]
        return made | {f"{n}.bias": torch.zeros(len(made[f"{n}.weight"])) for n in biased}

    embedding = random(vocab, hidden) * hidden**0.5
    # A token has some of the output vector that the one before is embedded as.
    output = 0.06 * embedding.roll(1, 0) + noise * random(vocab, hidden)
    mtp = "model.mtp_layers.0"
    state_and_token = torch.cat([noise * torch.eye(hidden), torch.eye(hidden)], 1)
    weights = {
        "model.embed_tokens.weight": embedding, "lm_head.weight": output,
        "model.norm.weight": torch.ones(hidden),
        f"{mtp}.token_layernorm.weight": torch.ones(hidden),
        f"{mtp}.hidden_layernorm.weight": torch.ones(hidden),
        f"{mtp}.final_layernorm.weight": torch.ones(hidden),
        f"{mtp}.input_proj.weight": state_and_token, **layer(mtp),
    }  # fmt: skip
    for index in range(config["num_hidden_layers"]):
        weights |= layer(f"model.layers.{index}")
    return save_head(directory, config, weights)


def as_the_target(target: str) -> dict[str, Any]:
    """What a head's configuration has of its target's; one layer, float32."""
    given = AutoConfig.from_pretrained(target).to_dict()
    found = {key: given[key] for key in _AS_THE_TARGET if key in given}
    head_dim = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    own = {"num_hidden_layers": 1, "tie_word_embeddings": False, "torch_dtype": "float32"}
    return {**found, "head_dim": head_dim, **own}


def random_matrices(seed: int) -> Callable[[int, int], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    return random


def _layer(
    random: Callable[[int, int], torch.Tensor], config: dict[str, Any], name: str, read: int
) -> dict[str, torch.Tensor]:
    """A layer whose attention reads vectors of this size."""
    hidden, width, head_dim = (
        config[key] for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        f"{name}.self_attn.q_proj.weight": random(heads * head_dim, read),
        f"{name}.self_attn.k_proj.weight": random(kv_heads * head_dim, read),
        f"{name}.self_attn.v_proj.weight": random(kv_heads * head_dim, read),
        f"{name}.self_attn.o_proj.weight": random(hidden, heads * head_dim),
        f"{name}.mlp.gate_proj.weight": random(width, hidden),
        f"{name}.mlp.up_proj.weight": random(width, hidden),
        f"{name}.mlp.down_proj.weight": random(hidden, width),
        f"{name}.input_layernorm.weight": torch.ones(hidden),
        f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
    }


def save_head(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, directory / "model.safetensors")
    return str(directory)
