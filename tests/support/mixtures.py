"""A tiny mixture of experts with a dense draft."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.support.generating import VOCAB
from tests.support.models import save_llama

_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "bos_token_id", "eos_token_id",
)  # fmt: skip


def save_mixture_pair(directory: Path, noise: float = 0.05) -> tuple[str, str]:
    """A tiny Mixtral, and a Llama as its draft, which is often right.

    Each of the target's experts is the draft's feed-forward layer with noise of its own.
    """
    draft = save_llama(
        directory / "draft", seed=3, scale=2.0, vocab_size=VOCAB, max_position_embeddings=512
    )
    dense = LlamaForCausalLM.from_pretrained(draft, dtype=torch.float32)
    shared = {name: getattr(dense.config, name) for name in _SHARED}
    torch.manual_seed(7)
    target = MixtralForCausalLM(MixtralConfig(**shared, num_local_experts=4, num_experts_per_tok=2))
    target.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, of_draft in zip(target.model.layers, dense.model.layers, strict=True):
            _become_experts(layer.mlp, of_draft.mlp, noise)
    target.save_pretrained(directory / "target")
    return str(directory / "target"), str(draft)


def _become_experts(mixture: Any, dense: Any, noise: float) -> None:
    mixture.gate.weight.normal_(0, 0.15)
    experts = mixture.experts
    experts.gate_up_proj.copy_(torch.cat([dense.gate_proj.weight, dense.up_proj.weight]))
    experts.down_proj.copy_(dense.down_proj.weight)
    for weights in (experts.gate_up_proj, experts.down_proj):
        weights.add_(torch.randn_like(weights), alpha=noise)
