"""What both kinds of head are made of: linear maps, a gated MLP and rotary embeddings."""

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

INITIAL_DEVIATION = 0.02  # as Llama's


class Linear(nn.Linear):
    """A map without a bias, drawn as Llama's are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=INITIAL_DEVIATION)


class GatedMLP(nn.Module):
    """SwiGLU, with Llama's names of the weights."""

    def __init__(self, hidden: int, mlp: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, mlp)
        self.up_proj = Linear(hidden, mlp)
        self.down_proj = Linear(mlp, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotate(heads: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Llama's rotary embedding: dimension i turns with dimension i + size / 2.

    Args:
        heads: Queries or keys, shape ``[batch, heads, tokens, size]``.
        positions: Shape ``[tokens]`` or ``[batch, 1, tokens]``.
        theta: The base of the frequencies.
    """
    half = heads.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=heads.device) / half)
    angles = positions[..., None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    first, second = heads.float().split(half, -1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    return turned.to(heads.dtype)


def split_heads(hidden: torch.Tensor, size: int) -> torch.Tensor:
    """``[batch, tokens, heads × size]`` as ``[batch, heads, tokens, size]``."""
    return hidden.unflatten(-1, (-1, size)).transpose(1, 2)


def join_heads(heads: torch.Tensor) -> torch.Tensor:
    """What ``split_heads`` took apart."""
    return heads.transpose(1, 2).flatten(2)


def attention_sizes(target: LlamaConfig) -> tuple[int, int]:
    """The width of a head's attention, all of its heads together, and the size of one."""
    size = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    return size * target.num_attention_heads, size


def shared_config(target: LlamaConfig) -> dict[str, object]:
    """The part of a head's config that is its target's."""
    names = (
        "vocab_size", "hidden_size", "num_attention_heads", "hidden_act", "max_position_embeddings",
        "rms_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    theta = target.rope_parameters["rope_theta"]
    return {
        **{name: getattr(target, name, None) for name in names},
        "head_dim": attention_sizes(target)[1],
        # Without the scaling that a target may have: a head is trained without it.
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "num_key_value_heads": target.num_attention_heads,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
