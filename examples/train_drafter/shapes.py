"""The sizes of a Llama model, and the model made from them."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from token_data import SPECIAL_TOKENS
from transformers import LlamaConfig, LlamaForCausalLM

PAD_ID, BOS_ID, EOS_ID = range(len(SPECIAL_TOKENS))
MAX_POSITIONS = 2048


@dataclass(frozen=True)
class Shape:
    """Hidden size × layers × attention heads × MLP size."""

    hidden: int
    layers: int
    heads: int
    mlp: int

    def __post_init__(self) -> None:
        if min(astuple(self)) < 1:
            raise ValueError(f"{self}: every size is at least 1")
        # Rotary embeddings turn pairs of a head's dimensions.
        if self.hidden % (2 * self.heads):
            raise ValueError(f"{self}: the hidden size is not a multiple of 2 × heads")

    def __str__(self) -> str:
        return "x".join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads ``HIDDENxLAYERSxHEADSxMLP``."""
        sizes = text.split("x")
        if len(sizes) != 4 or not all(size.isdecimal() for size in sizes):
            raise ValueError(f"{text!r} is not HIDDENxLAYERSxHEADSxMLP, such as 256x4x4x672")
        return cls(*map(int, sizes))

    @property
    def peak_learning_rate(self) -> float:
        """Narrow models bear twice the rate."""
        return 3e-3 if self.hidden <= 192 else 1.5e-3


def new_model(shape: Shape, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A randomly initialised model in float32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.mlp,
            max_position_embeddings=MAX_POSITIONS,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            pad_token_id=PAD_ID,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
        )
    )
