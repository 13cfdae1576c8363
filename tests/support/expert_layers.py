"""Layers of multi-token prediction (MTP) in checkpoints, and tiny mixtures of experts with them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models import SMALL
from tests.support.recurrent import STATES

_LAYERS, _HIDDEN, _VOCAB = 2, 64, 256
_NOISE = 0.8  # weight of what layers add to a token's embedding, which both have in common
_COMMON = {
    **SMALL, "vocab_size": _VOCAB, "num_hidden_layers": _LAYERS, "moe_intermediate_size": 64,
    "tie_word_embeddings": False, "pad_token_id": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
_LAST = f"model.layers.{_LAYERS}"
OWN_NAMES = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
# By kind: its own fields, its MTP layer's prefix, the names of the norms of tokens and states, of
# the matrix that reads both, of the last norm.
KINDS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "Glm4Moe": (
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "expert_hidden_dim": 64,
        },
        _LAST,
        (f"{_LAST}.enorm", f"{_LAST}.hnorm", f"{_LAST}.eh_proj", f"{_LAST}.shared_head.norm"),
    ),
    "Ernie4_5_Moe": (
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1},
        "model.mtp_block.0",
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", ""),
    ),
    "HYV3": (
        {
            "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1,
            "first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True,
            "qk_norm": True,
        },
        _LAST,
        (f"{_LAST}.enorm", f"{_LAST}.hnorm", f"{_LAST}.eh_proj", f"{_LAST}.final_layernorm"),
    ),
    "ExaoneMoe": (
        {
            "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1,
            "first_k_dense_replace": 1, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "mtp.layers.0",
        OWN_NAMES,
    ),
    # Keys of 48 channels and values of 32; a window and sinks in the first layer, and in its MTP
    # layer. The fields from ``sliding_window_size`` on have vLLM's names, and those of checkpoints.
    "MiMoV2Flash": (
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 48, "v_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
            "mlp_layer_types": ["dense", "sparse"], "num_attention_heads": 4,
            "sliding_window_size": 16, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1],
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 48,
            "swa_v_head_dim": 32, "add_swa_attention_sink_bias": True, "layernorm_epsilon": 1e-5,
            "partial_rotary_factor": 0.334, "architectures": ["MiMoV2FlashForCausalLM"],
        },
        "model.mtp.layers.0",
        tuple(
            f"model.mtp.layers.0.{name}"
            for name in ("enorm", "hnorm", "pre_mlp_layernorm", "eh_proj", "final_layernorm")
        ),
    ),
    "Qwen3Next": (
        {
            "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention", "full_attention"], **STATES,
        },
        "mtp.layers.0",
        OWN_NAMES,
    ),
}  # fmt: skip


def save_experts(directory: Path, kind: str, vocab: int = _VOCAB) -> str:
    """A target of this kind with random weights; its MTP layer is one of its own again.

    Both know a little that after a token comes the next one.
    """
    import transformers

    own, prefix, names = KINDS[kind]
    config = getattr(transformers, f"{kind}Config")(**_COMMON | {"vocab_size": vocab} | own)
    torch.manual_seed(8)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    embedding = torch.randn(vocab, _HIDDEN)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                adds = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                scale = (_NOISE if adds else 1.0) / parameter.shape[-1] ** 0.5
                parameter.normal_(0, scale)
            elif name.endswith(("A_log", "dt_bias")):  # states that last for some tokens
                parameter.uniform_(-1.0, 0.5)
        model.get_input_embeddings().weight.copy_(embedding)
        model.lm_head.weight.normal_(0, _NOISE / _HIDDEN**0.5)
        model.lm_head.weight.add_(0.06 * embedding.roll(1, 0))
    model.save_pretrained(directory)
    dense = kind in ("Ernie4_5_Moe", "ExaoneMoe", "MiMoV2Flash")
    add_layer(directory, f"model.layers.{0 if dense else _LAYERS - 1}.", prefix, names, _NOISE)
    return str(directory)


def add_layer(
    directory: Path, copied: str, prefix: str, names: tuple[str, ...], states: float
) -> None:
    """Adds an MTP layer to a checkpoint: one of its own layers again.

    Args:
        copied: What the names of that layer begin with.
        prefix, names: As in `KINDS`.
        states: Weight of the target's states, beside tokens.
    """
    file = directory / "model.safetensors"
    weights = load_file(file)
    layer = {
        f"{prefix}.{name.removeprefix(copied)}": weight.clone()
        for name, weight in weights.items()
        if name.startswith(copied)
    }
    *norms, matrix, last_norm = names
    weights |= layer | reads_both(matrix, (*norms, last_norm), states)
    save_file(weights, file, {"format": "pt"})


def reads_both(matrix: str, norms: Iterable[str], states: float) -> dict[str, torch.Tensor]:
    """Weights by which an MTP layer reads tokens and, with weight ``states``, the target's states.

    Args:
        matrix, norms: Their names; empty for a norm that there is not.
    """
    same = torch.eye(_HIDDEN)
    found = {f"{name}.weight": torch.ones(_HIDDEN) for name in norms if name}
    return {**found, f"{matrix}.weight": torch.cat([same, states * same], dim=1)}
