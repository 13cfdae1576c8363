"""Trained heads for the tests, and tiny ones that are not trained."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from tests.support.models import MODELS

EAGLE3, DFLASH = (str(MODELS / kind) for kind in ("eagle3", "dflash"))


def save_eagle3(
    directory: Path,
    target: str,
    tokens: list[int],
    seed: int = 0,
    scale: float = 1.0,
    layers: tuple[int, ...] = (1, 2),
) -> str:
    """An EAGLE-3 head for this target, with random weights.

    Args:
        directory: Where it goes.
        target: Folder of a Llama model.
        tokens: The target's tokens that it may draft, ascending.
        seed: Of its weights.
        scale: Of its LM head's: how sure it is of what it drafts.
        layers: The target's layers before which the hidden states are taken that it reads.
    """
    target_config = AutoConfig.from_pretrained(target).to_dict()
    hidden, width = target_config["hidden_size"], target_config["intermediate_size"]
    heads, kv_heads = (target_config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    head_dim = target_config.get("head_dim") or hidden // heads
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights = {
        "fc.weight": random(hidden, len(layers) * hidden),
        "midlayer.self_attn.q_proj.weight": random(heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random(kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random(hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": random(width, hidden),
        "midlayer.mlp.up_proj.weight": random(width, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, width),
        **{f"midlayer.{name}.weight": torch.ones(hidden) for name in norms},
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": scale * random(len(tokens), hidden),
        "d2t": torch.tensor(tokens) - torch.arange(len(tokens)),
    }
    config = {
        **{key: target_config[key] for key in _AS_THE_TARGET if key in target_config},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "draft_vocab_size": len(tokens),
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        "torch_dtype": "float32",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, directory / "model.safetensors")
    return str(directory)


_AS_THE_TARGET = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters", "rope_theta", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
