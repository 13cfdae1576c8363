"""What a DFlash head drafts, from its checkpoint alone: one prefix of a text at a time."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional


def target_layers(folder: Path) -> tuple[int, ...]:
    """The target's layers that the head reads; 0 is the embedding."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return tuple(layer + 1 for layer in config["dflash_config"]["target_layer_ids"])


def dflash_drafts(folder: Path, target: Any, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """The most likely block after every prefix of one text.

    Args:
        target: Gives the target's hidden states, embedding and output layer.
        tokens: The text, ``[length]``.

    Returns:
        Shape ``[length - 1, count]``: row s drafts the tokens from s + 2 on, with the target's
        hidden states of tokens 0 to s.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = {name: one.float() for name, one in load_file(folder / "model.safetensors").items()}
    size, theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
    mask = config["dflash_config"]["mask_token_id"]

    def linear(name: str, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(states, weights[f"{name}.weight"])

    def norm(name: str, states: torch.Tensor) -> torch.Tensor:
        scale = weights[f"{name}.weight"]
        return functional.rms_norm(states, scale.shape, scale, config["rms_norm_eps"])

    def heads(name: str, states: torch.Tensor) -> torch.Tensor:
        return linear(name, states).unflatten(-1, (-1, size)).transpose(0, 1)

    def turned(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * theta ** (-torch.arange(size // 2) / (size // 2))
        first, second = states.chunk(2, -1)
        real, imaginary = angles.cos(), angles.sin()
        return torch.cat((first * real - second * imaginary, second * real + first * imaginary), -1)

    text = norm("hidden_norm", linear("fc", target(tokens[None])[0]))
    drafts = []
    for anchor in range(1, len(tokens)):
        block = torch.full((count + 1,), mask)
        block[0] = tokens[anchor]
        hidden, positions = target.embed(block), torch.arange(anchor + count + 1)
        for layer in (f"layers.{number}" for number in range(config["num_hidden_layers"])):
            own = norm(f"{layer}.input_layernorm", hidden)
            seen, at = torch.cat((text[:anchor], own)), f"{layer}.self_attn"
            query = turned(norm(f"{at}.q_norm", heads(f"{at}.q_proj", own)), positions[anchor:])
            key = turned(norm(f"{at}.k_norm", heads(f"{at}.k_proj", seen)), positions)
            value = heads(f"{at}.v_proj", seen)
            attended = functional.scaled_dot_product_attention(query, key, value)
            hidden = hidden + linear(f"{at}.o_proj", attended.transpose(0, 1).flatten(1))
            own, at = norm(f"{layer}.post_attention_layernorm", hidden), f"{layer}.mlp"
            gated = functional.silu(linear(f"{at}.gate_proj", own)) * linear(f"{at}.up_proj", own)
            hidden = hidden + linear(f"{at}.down_proj", gated)
        logits = functional.linear(norm("norm", hidden[1:]), target.output_embedding)
        drafts.append(logits.argmax(-1))
    return torch.stack(drafts)
