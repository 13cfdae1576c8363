"""A tiny Kimi Linear with an ordinary draft, and what lets vLLM run it in float32 on CPUs."""

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.latents import SHARED, rehearse_on_gpus, write_latents
from tests.support.recurrent import (
    VOCABULARY,
    convolve_prompts,
    convolves_on_gpus,
    exponential,
    logarithm,
    run_without_dependent_launches,
)

HEADS, SIZE, WIDTH = 2, 16, 4
_LATENTS = {"kv_lora_rank": 256, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
# A token's keys and values take the bytes of a latent: all cache groups have blocks of 128 tokens.
_OF_DRAFT = {"num_key_value_heads": 2, "head_dim": 80}


def save_kimi_pair(directory: Path, vocab: int = VOCABULARY) -> tuple[str, str]:
    """A latent layer between two of Kimi Delta Attention, and a Llama as its draft.

    They share embeddings and head, which know each token's likeliest successor. The target's layers
    decide how often the draft is wrong.
    """
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    torch.manual_seed(0)
    shared = {**SHARED, "vocab_size": vocab}
    states = {"head_dim": SIZE, "num_heads": HEADS, "short_conv_kernel_size": WIDTH}
    config = KimiLinearConfig(
        **shared, **_LATENTS, num_hidden_layers=3, num_key_value_heads=2, mla_use_nope=True,
        architectures=["KimiLinearForCausalLM"],
        linear_attn_config={"kda_layers": [1, 3], "full_attn_layers": [2], **states},
    )  # fmt: skip
    draft = LlamaForCausalLM(LlamaConfig(**shared, **_OF_DRAFT, num_hidden_layers=1)).float()
    embeddings = torch.randn(vocab, SHARED["hidden_size"])
    weights = {
        "model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings.roll(1, 0) * 0.2,
        "model.norm.weight": torch.ones(SHARED["hidden_size"]),
    }  # fmt: skip
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
            if re.search("o_proj|down_proj", name):
                parameter.mul_(0.1)
    draft.load_state_dict(weights, strict=False)
    target, folder = directory / "target", str(directory / "draft")
    config.save_pretrained(target)
    for layer in range(config.num_hidden_layers):
        weights |= _layer(f"model.layers.{layer}", config, config.is_kda_layer(layer))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    draft.save_pretrained(folder)
    return str(target), folder


def _layer(prefix: str, config: Any, is_recurrent: bool) -> dict[str, Tensor]:
    """Random weights of a layer, by their names in checkpoints."""
    hidden, inner, keys, heads = config.hidden_size, config.intermediate_size, HEADS * SIZE, 2
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    plain, value = config.qk_nope_head_dim, config.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    if is_recurrent:
        own: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), (keys, hidden)),
            **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), (keys, 1, WIDTH)),
            **dict.fromkeys(("f_a_proj", "g_a_proj"), (SIZE, hidden)),
            **dict.fromkeys(("f_b_proj", "g_b_proj"), (keys, SIZE)),
            "b_proj": (HEADS, hidden), "o_norm": (SIZE,), "o_proj": (hidden, keys),
        }  # fmt: skip
    else:
        own = {
            "q_proj": (heads * (plain + rotated), hidden), "kv_a_layernorm": (rank,),
            "kv_a_proj_with_mqa": (rank + rotated, hidden),
            "kv_b_proj": (heads * (plain + value), rank), "o_proj": (hidden, heads * value),
        }  # fmt: skip
    shapes |= {f"self_attn.{name}": shape for name, shape in own.items()}
    found = {
        f"{prefix}.{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape)
        for name, shape in shapes.items()
    }
    for name, weight in found.items():
        if weight.ndim > 1:
            into_stream = "o_proj" in name or "down_proj" in name
            weight.mul_(0.5 if "conv1d" in name else 0.14 if into_stream else 0.15)
    if is_recurrent:
        # Old checkpoints' form.
        found[f"{prefix}.self_attn.A_log"] = torch.empty(1, 1, HEADS, 1).uniform_(-1.0, 0.5)
        found[f"{prefix}.self_attn.dt_bias"] = torch.empty(keys).uniform_(-1.0, 0.5)
    return found


def run_kimi_as_on_gpus() -> None:
    """Test only: the layers of Kimi Linear in this process do here what they do on GPUs."""
    from vllm.model_executor.layers import utils

    _replace_kernels()
    utils.dispatch_cpu_unquantized_gemm = _keep_weight
    torch.cuda.Stream = _Stream


def rehearse_kimi_on_gpus() -> None:
    """`run_kimi_as_on_gpus` on the GPU engine without a GPU."""
    # As Kimi Linear's configuration sets it; layers are imported before.
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    rehearse_on_gpus()
    _replace_kernels()


def _replace_kernels() -> None:
    """Prompts are read by the plain recurrence, for plain engines and ours alike.

    Decoding is vLLM's kernel. Operators of the GPU build, which store latents, are in torch.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as layers
    from vllm.models.kimi_k3.nvidia import mla
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"  # needs a library of the GPU build
    fused_recurrent.exp, fused_recurrent.log = exponential, logarithm
    kda.chunk_kda_with_fused_gate = read_prompts
    layers.gather_initial_states = _initial_states
    layers.causal_conv1d_fn = convolve_prompts
    layers.causal_conv1d_update = convolves_on_gpus()
    run_without_dependent_launches()
    mla.fused_mla_decode_q_concat_kv_cache_insert = _decode
    mla.fused_mla_key_concat_kv_cache_insert = _read
    mla.fused_mla_kv_concat = _whole_keys
    ops.gather_and_maybe_dequant_cache = _gather_latents
    read_context = CPUSDPAMLAPrefillBackend.run_prefill_context_chunk

    def run_prefill_context_chunk(
        self: Any, *args: Any, out: Tensor | None = None, **named: Any
    ) -> tuple[Tensor, Tensor]:
        found, scales = read_context(self, *args, **named)
        return (found if out is None else out.copy_(found)), scales

    CPUSDPAMLAPrefillBackend.run_prefill_context_chunk = run_prefill_context_chunk


def _keep_weight(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = functional.linear


class _Stream:
    """The model has one for latent layers with output gates; these have none."""


def read_prompts(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor,  # noqa: N803
    g_bias: Tensor, lower_bound: float | None, initial_state: Tensor, cu_seqlens: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stands for `chunk_kda_with_fused_gate`."""
    assert options == {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    query, key = (
        each[0] / (each[0].square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k)
    )
    gates, rate = raw_g[0] + g_bias.view(raw_g.shape[2:]), A_log.exp()[:, None]
    if lower_bound is None:
        decays = (-rate * functional.softplus(gates)).exp()
    else:
        decays = (lower_bound * torch.sigmoid(rate * gates)).exp()
    states, output = initial_state.clone(), torch.zeros_like(v)
    for request, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = states[request]
        for row in range(first, end):
            state = state * decays[row][:, None]
            missing = v[0, row] - (state @ key[row][..., None])[..., 0]
            update = raw_beta[0, row].sigmoid()[:, None] * missing
            state = state + update[..., None] * key[row][:, None]
            output[0, row] = (state @ query[row][..., None])[..., 0] * k.shape[-1] ** -0.5
        states[request] = state
    return output, states


def _initial_states(state: Tensor, indices: Tensor, begun: Tensor) -> Tensor:
    return state[indices].where(begun[:, None, None, None], 0)


def _whole_keys(keys: Tensor, rotated: Tensor) -> Tensor:
    shared = rotated.reshape(len(keys), 1, -1).expand(-1, keys.shape[1], -1)
    return torch.cat((keys, shared), dim=-1)


def _read(
    _: Tensor, keys: Tensor, rotated: Tensor, latents: Tensor, cache: Tensor, slots: Tensor,
    *positions: None,
) -> Tensor:  # fmt: skip
    write_latents(None, latents, rotated, cache, slots)
    return _whole_keys(keys, rotated)


def _decode(
    query: Tensor, rotated_query: Tensor, latents: Tensor, rotated: Tensor, cache: Tensor,
    slots: Tensor, **positions: None,
) -> Tensor:  # fmt: skip
    write_latents(None, latents, rotated, cache, slots)
    return torch.cat((query, rotated_query), dim=-1)


def _gather_latents(
    *, src_cache: Tensor, dst: Tensor, block_table: Tensor, cu_seq_lens: Tensor,
    seq_starts: Tensor, num_tokens: int, **options: Any,
) -> None:  # fmt: skip
    from vllm._custom_ops import gather_mla_context_cache_cpu

    gather_mla_context_cache_cpu(
        src_cache=src_cache, dst=dst[:num_tokens], block_table=block_table, starts=seq_starts,
        cu_seq_lens=cu_seq_lens,
    )  # fmt: skip
