"""Tiny targets with Mamba2 layers or short convolutions, and what lets vLLM run them on CPUs."""

import json
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.expert_layers import reads_both
from tests.support.models import SMALL, save_pair
from tests.support.recurrent import convolve_prompts, run_without_dependent_launches

VOCABULARY = 64
_SHARED = {**SMALL, "num_hidden_layers": 3, "pad_token_id": 2, "tie_word_embeddings": False}
_MAMBA = {
    "mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_head": 32,
    "mamba_d_conv": 4, "mamba_chunk_size": 16, "mamba_expand": 1,
}  # fmt: skip
_TYPES = ["mamba", "attention", "mamba"]
CONFIGS: dict[str, dict[str, Any]] = {
    "GraniteMoeHybrid": {
        **_MAMBA, "layer_types": _TYPES, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 128, "attention_multiplier": 32**-0.5,
    },
    "NemotronH": {
        "layers_block_type": _TYPES, "mamba_num_heads": 2, "mamba_head_dim": 32, "n_groups": 1,
        "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 16,
    },
    "FalconH1": {
        **_MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": False, "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
    },
    "Lfm2": {
        "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False, "conv_dim": 64, "block_dim": 64,
    },
}  # fmt: skip
"""Fields of a tiny target's configuration, by what its class in `transformers` begins with."""


def save_mamba_pair(
    directory: Path, name: str, scale: float = 0.25, vocab: int = VOCABULARY
) -> tuple[str, str]:
    """A target of `CONFIGS`, and as its draft a Llama with its embedding, whose layers add nothing.

    `scale`: weight of what the target's layers add, which decides how often the draft is wrong.
    """
    import transformers as hf

    torch.manual_seed(0)
    shared = {**_SHARED, "vocab_size": vocab}
    config = getattr(hf, f"{name}Config")(**shared, **CONFIGS[name])
    target = getattr(hf, f"{name}ForCausalLM")(config).float()
    shape = {**shared, "num_hidden_layers": 1}
    draft = hf.LlamaForCausalLM(hf.LlamaConfig(**shape)).float()
    into_stream = ("o_proj", "out_proj", "down_proj", "output_linear", ".w2.")
    with torch.no_grad():
        for key, parameter in target.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
            if any(part in key for part in into_stream):
                parameter.mul_(scale)
            elif key.endswith(("A_log", "dt_bias", "D")):
                parameter.uniform_(-1.0, 0.5)
        if name == "Lfm2":  # vLLM's has one matrix, whatever the configuration says
            target.get_output_embeddings().weight.copy_(target.get_input_embeddings().weight)
        draft.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight)
        draft.get_output_embeddings().weight.copy_(target.get_output_embeddings().weight)
        for key, parameter in draft.named_parameters():
            if "o_proj" in key or "down_proj" in key:
                parameter.zero_()
    return save_pair(directory, target, draft)


def save_nemotron_layer(directory: Path, vocab: int) -> str:
    """NemotronH's target with its layer of multi-token prediction (MTP): attention, then experts.

    Attention is the target's own again.
    """
    target = Path(save_mamba_pair(directory, "NemotronH", scale=0.1, vocab=vocab)[0])
    file, hidden, inner, experts = target / "config.json", _SHARED["hidden_size"], 32, 4
    of_experts = {
        "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E",
        "n_routed_experts": experts, "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": inner,
    }  # fmt: skip
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | of_experts), "utf-8")
    weights = load_file(target / "model.safetensors")
    attention, mixer = "backbone.layers.1.", "mtp.layers.1.mixer"
    weights |= {
        name.replace(attention, "mtp.layers.0."): weight.clone()
        for name, weight in weights.items() if name.startswith(attention)
    }  # fmt: skip
    norms = "0.enorm", "0.hnorm", "1.norm", "1.final_layernorm"
    weights |= reads_both(
        "mtp.layers.0.eh_proj", (f"mtp.layers.{name}" for name in norms), states=0.5
    )
    weights[f"{mixer}.gate.weight"] = torch.randn(experts, hidden)
    weights[f"{mixer}.gate.e_score_correction_bias"] = torch.zeros(experts)
    for expert in (*(f"experts.{number}" for number in range(experts)), "shared_experts"):
        for name, shape in ("up", (inner, hidden)), ("down", (hidden, inner)):
            weights[f"{mixer}.{expert}.{name}_proj.weight"] = 0.05 * torch.randn(shape)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def run_as_on_gpus() -> None:
    """Test only: the layers of this process do here what they do on GPUs.

    vLLM's RoPE on CPUs takes a dimension of heads (LFM2's) for one of tokens, and reads behind
    positions. Its Mamba2 on CPUs leaves out states within prompts, which it caches elsewhere: the
    plain recurrence reads prompts, for plain engines and ours alike.
    """
    from vllm.model_executor.layers.mamba import short_conv
    from vllm.model_executor.layers.mamba.ops import ssd_combined
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    short_conv.current_platform = SimpleNamespace(is_cpu=lambda: False)
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    ssd_combined._mamba_chunk_scan_combined_fwd = read_prompts


def rehearse_as_on_gpus() -> None:
    """`run_as_on_gpus` on the GPU engine without a GPU."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # stand-ins first: layers import some of them by name
    from vllm.model_executor.layers.activation import ReLUSquaredActivation
    from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    run_as_on_gpus()
    RotaryEmbedding.forward_cuda = RotaryEmbedding.forward_native
    # Operators of the GPU build; only experts, which MTP layers have, ask for them.
    os.environ["VLLM_USE_FUSED_MOE_GROUPED_TOPK"] = "0"
    torch.ops._C.relu_squared = None
    ReLUSquaredActivation.forward_cuda = ReLUSquaredActivation.forward_native
    run_without_dependent_launches()
    for layers in (mamba_mixer2, short_conv):
        layers.causal_conv1d_fn = convolve_prompts


def read_prompts(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, out: Tensor, *,
    dt_bias: Tensor, initial_states: Tensor | None, return_intermediate_states: bool,
    seq_idx: Tensor, cu_chunk_seqlens: Tensor, last_chunk_indices: Tensor, **options: Any,
) -> Tensor:  # fmt: skip
    """Stands for `_mamba_chunk_scan_combined_fwd`: token by token."""
    heads, size = x.shape[1:]
    b, c = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (b, c))
    step = torch.nn.functional.softplus(dt + dt_bias)
    requests, skipped, states = seq_idx.tolist(), options["D"], []
    for chunk, (first, end) in enumerate(pairwise(cu_chunk_seqlens.tolist())):
        if chunk == 0 or requests[chunk] != requests[chunk - 1]:
            state = torch.zeros(heads, size, b.shape[2])
            if initial_states is not None:
                state = initial_states[requests[chunk]]
        for row in range(first, end):
            new = (step[row][:, None] * x[row])[..., None] * b[row][:, None]
            state = (step[row] * a).exp()[:, None, None] * state + new
            out[row] = (state @ c[row][..., None])[..., 0] + skipped[:, None] * x[row]
        states.append(state)
    found = torch.stack(states)
    return found if return_intermediate_states else found[last_chunk_indices]
