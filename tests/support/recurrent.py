"""Tiny targets with Gated DeltaNet layers, and what lets vLLM run them in float32 on CPUs."""

import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers as hf
import triton
import triton.language as tl
from transformers import Qwen3Config, Qwen3ForCausalLM

from sequoia_vllm.engine.common.patched import patched
from tests.support.models import SMALL, save_pair

VOCABULARY = 64
_SHARED = {
    **SMALL, "vocab_size": VOCABULARY, "pad_token_id": 2, "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}  # fmt: skip
STATES: dict[str, Any] = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def save_hybrid_pair(
    directory: Path, scale: float = 0.5, key: int = 16, value: int = 32, experts: bool = True
) -> tuple[str, str]:
    """A Qwen3-Next of one attention layer between two recurrent ones, and its draft.

    Without `experts` it is a Qwen3.5.

    The draft is a Qwen3 of the attention layer alone. `scale`: weight of the recurrent layers,
    which decide how often it is wrong.
    `key`, `value`: sizes of theirs.
    """
    torch.manual_seed(0)
    common = {
        **_SHARED, **STATES, "linear_key_head_dim": key, "linear_value_head_dim": value,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "partial_rotary_factor": 1.0,
    }  # fmt: skip
    if experts:
        config = hf.Qwen3NextConfig(
            **common, num_experts=2, num_experts_per_tok=1, decoder_sparse_step=1,
            mlp_only_layers=[1], moe_intermediate_size=32, shared_expert_intermediate_size=32,
        )  # fmt: skip
        target = hf.Qwen3NextForCausalLM(config).float()
    else:
        axes = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
        rope = {**axes, "partial_rotary_factor": 1.0, "mrope_interleaved": True}
        target = hf.Qwen3_5ForCausalLM(
            hf.Qwen3_5TextConfig(**{**common, "rope_parameters": rope})
        ).float()
    draft = Qwen3ForCausalLM(Qwen3Config(**_SHARED, num_hidden_layers=1)).float()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
            if "linear_attn.out_proj" in name or ("layers.1" not in name and "down_proj" in name):
                parameter.mul_(scale)
            elif name.endswith(("A_log", "dt_bias")):
                parameter.uniform_(-1.0, 0.5)
        attention = target.model.layers[1].self_attn
        heads = attention.q_proj.weight.view(2, 2, 32, 64)
        heads[:, 1] = 0  # output gates: half of everything
    _copy(target, draft)
    return save_pair(directory, target, draft)


def _copy(target: Any, draft: Any) -> None:
    """Gives the draft the target's attention layer, embeddings and head."""
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        draft.lm_head.weight.copy_(target.lm_head.weight)
        draft.model.norm.weight.copy_(target.model.norm.weight + 1)
        ours, layer = draft.model.layers[0], target.model.layers[1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(ours, name).weight.copy_(getattr(layer, name).weight + 1)
        ours.mlp.load_state_dict(layer.mlp.state_dict())
        attention, own = layer.self_attn, ours.self_attn
        own.q_proj.weight.copy_(attention.q_proj.weight.view(2, 2, 32, 64)[:, 0].reshape(64, 64))
        own.k_proj.weight.copy_(attention.k_proj.weight)
        own.v_proj.weight.copy_(attention.v_proj.weight)
        own.o_proj.weight.copy_(attention.o_proj.weight / 2)
        own.q_norm.weight.copy_(attention.q_norm.weight + 1)
        own.k_norm.weight.copy_(attention.k_norm.weight + 1)


def run_in_float32() -> None:
    """Test only: vLLM's recurrent layers in this process take any dtype, as no kernels of it do.

    Its chunked kernels for prompts refuse float32, and its layers on CPUs know bfloat16 alone.
    Prompts are read by the plain recurrence, token by token, for plain engines and ours alike. All
    else is vLLM's code for GPUs.
    """
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    # The interpreter replaces functions in Triton's module, and not this other name for one.
    fused_recurrent.exp = exponential
    layers.fla_chunk_gated_delta_rule = layers.fi_chunk_gated_delta_rule = read_prompts
    run_without_dependent_launches()
    attention = layers.QwenGatedDeltaNetAttention
    attention.forward_cpu = attention.forward_cuda


def run_chains() -> None:
    """Test only: vLLM's own chains convolve by its Triton kernel, after `run_in_float32`.

    The operator for CPUs, which vLLM puts in its place here, knows one token per request.
    """
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers

    layers.causal_conv1d_update = convolves_on_gpus()


def convolves_on_gpus() -> Any:
    """vLLM's Triton `causal_conv1d_update`, in whose place it puts another one on CPUs."""
    from vllm.model_executor.layers.mamba.ops import causal_conv1d
    from vllm.platforms import current_platform

    spec = causal_conv1d.__spec__
    as_on_gpus = importlib.util.module_from_spec(spec)
    with patched(type(current_platform), "is_cpu", lambda _: False):
        spec.loader.exec_module(as_on_gpus)
    return as_on_gpus.causal_conv1d_update


def run_without_dependent_launches() -> None:
    """An H100's kernels wait for the ones before, which is no operation of the interpreter's."""
    from vllm.platforms import current_platform

    type(current_platform).is_arch_support_pdl = classmethod(lambda _: False)


def rehearse_in_float32() -> None:
    """`run_in_float32` on the GPU engine without a GPU."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # stand-ins first: layers import some of them by name
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers

    run_in_float32()
    layers.causal_conv1d_fn = convolve_prompts


@triton.jit
def exponential(value):
    """Stands for a name that vLLM gives to Triton's own function."""
    return tl.exp(value)


@triton.jit
def logarithm(value):
    """Stands for a name that vLLM gives to Triton's own function."""
    return tl.log(value)


def read_prompts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, cu_seqlens: torch.Tensor, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Stands for `chunk_gated_delta_rule` on prompts whose queries and keys have length 1."""
    assert not options.get("use_qk_l2norm_in_kernel")
    group = v.shape[2] // k.shape[2]
    query, key = (each[0].float().repeat_interleave(group, dim=1) for each in (q, k))
    states, output = initial_state.float().clone(), torch.zeros_like(v)
    for request, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = states[request]
        for row in range(first, end):
            state = state * g[0, row].float().exp()[:, None, None]
            missing = v[0, row].float() - (state @ key[row][..., None])[..., 0]
            update = beta[0, row].float()[:, None] * missing
            state = state + update[..., None] * key[row][:, None]
            output[0, row] = (state @ query[row][..., None])[..., 0] * k.shape[-1] ** -0.5
        states[request] = state
    return output, states


def convolve_prompts(
    x: torch.Tensor, weight: torch.Tensor, bias: None, *, conv_states: torch.Tensor,
    has_initial_state: torch.Tensor, cache_indices: torch.Tensor, query_start_loc: torch.Tensor,
    activation: str | None, metadata: Any,
) -> torch.Tensor:  # fmt: skip
    """Stands for `causal_conv1d_fn`, whose launch changes its arguments: not in the rehearsal."""
    output, width = torch.empty_like(x), weight.shape[1]
    starts = pairwise(query_start_loc.tolist())
    for (first, end), block, begun in zip(starts, cache_indices, has_initial_state, strict=False):
        if first < end:
            before = conv_states[block].where(begun, 0)
            window = torch.cat([before, x[:, first:end]], dim=1)
            sums = (window.unfold(1, width, 1) * weight[:, None]).sum(-1)
            output[:, first:end] = torch.nn.functional.silu(sums) if activation else sums
            conv_states[block] = window[:, 1 - width :]
    return output
