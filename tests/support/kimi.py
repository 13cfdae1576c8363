"""Tiny targets with layers of Kimi's or of Ling's and an ordinary draft, for CPUs.

KimiLinear, KimiK3 and BailingMoeV3 have Kimi Delta Attention, BailingMoeV2_5 linear attention, and
all have latent attention. KimiK3 is that class's text model: a KimiLinear with other gates. What
lets vLLM run them in float32 here is below.
"""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from tests.support.expert_layers import reads_both
from tests.support.latents import SHARED, rehearse_on_gpus, write_latents
from tests.support.models import save_config
from tests.support.recurrent import (
    VOCABULARY,
    convolve_prompts,
    convolves_on_gpus,
    exponential,
    logarithm,
    run_in_float32,
    run_without_dependent_launches,
)

HEADS, SIZE, WIDTH = 2, 16, 4
LINEAR_SIZE = 64  # vLLM's kernel for prompts takes no smaller heads
KIMI, K3, LINEAR, LING = KINDS = ["KimiLinear", "KimiK3", "BailingMoeV2_5", "BailingMoeV3"]
_STATES = {"head_dim": SIZE, "num_heads": HEADS, "short_conv_kernel_size": WIDTH}
_BAILING = {
    "model_type": "bailing_hybrid", "rms_norm_eps": 1e-6, "use_bias": False,
    "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_LAYERS = {"kda_layers": [1, 3], "full_attn_layers": [2], **_STATES}
_GATES = {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
# By kind: what its configuration says beside what all have.
_CONFIGS: dict[str, dict[str, Any]] = {
    KIMI: {
        "model_type": "kimi_linear", "mla_use_nope": True, "linear_attn_config": _LAYERS,
        "architectures": ["KimiLinearForCausalLM"],
    },
    LINEAR: {
        **_BAILING, "head_dim": LINEAR_SIZE, "layer_group_size": 2, "use_qkv_bias": False,
        "num_experts": 1, "num_shared_experts": 0, "use_qk_norm": True, "group_norm_size": HEADS,
    },
    LING: {
        **_BAILING, "head_dim": SIZE, "layer_group_size": 3, "short_conv_kernel_size": WIDTH,
        "no_kda_lora": True, "kda_safe_gate": True, "kda_lower_bound": -5.0, "num_experts": 4,
        "first_k_dense_replace": 3, "gated_attention_proj_granularity_type": "head_wise",
    },
}  # fmt: skip
_CONFIGS[K3] = _CONFIGS[KIMI] | {"linear_attn_config": _LAYERS | _GATES}
_LATENT_LAYER = {KIMI: 1, K3: 1, LINEAR: 1, LING: 2}
_LATENTS = {"kv_lora_rank": 256, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
# A token's keys and values take the bytes of a latent: all cache groups have blocks of 128 tokens.
_OF_DRAFT = {"num_key_value_heads": 2, "head_dim": 80}


class _OwnConfig(PreTrainedConfig):
    """Stands for the class that Ling's checkpoints bring along."""

    model_type = "bailing_hybrid"


def save_kimi_pair(directory: Path, vocab: int = VOCABULARY, kind: str = KIMI) -> tuple[str, str]:
    """A latent layer and two with states, and a Llama as its draft.

    They share embeddings and head, which know each token's likeliest successor. The target's layers
    decide how often the draft is wrong.
    """
    AutoConfig.register("bailing_hybrid", _OwnConfig, exist_ok=True)
    torch.manual_seed(0)
    shared = {**SHARED, "vocab_size": vocab}
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
    of_target = {
        **shared, **_LATENTS, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "architectures": [f"{kind}ForCausalLM"], **_CONFIGS[kind],
    }  # fmt: skip
    target, folder = save_config(directory / "target", of_target), str(directory / "draft")
    for layer in range(3):
        weights |= _layer(f"model.layers.{layer}", kind, layer != _LATENT_LAYER[kind])
    if kind in (LINEAR, LING):
        weights["model.word_embeddings.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, Path(target) / "model.safetensors", metadata={"format": "pt"})
    draft.save_pretrained(folder)
    return target, folder


def save_ling_layer(directory: Path, vocab: int, kind: str) -> str:
    """The same target with a layer of multi-token prediction (MTP): latents, and experts.

    Kimi K3's has no experts here.
    """
    target = Path(save_kimi_pair(directory, vocab, kind)[0])
    file, prefix, hidden = target / "config.json", "model.layers.3", SHARED["hidden_size"]
    config = json.loads(file.read_text("utf-8"))
    experts, inner = config.get("num_experts", 0), 32
    config |= {
        "num_nextn_predict_layers": 1, "num_experts_per_tok": 1, "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": inner, "num_shared_experts": 1, "n_group": 1,
        "topk_group": 1,
    }  # fmt: skip
    file.write_text(json.dumps(config), "utf-8")
    weights = load_file(target / "model.safetensors")
    layer = _layer(prefix, kind, is_recurrent=False)
    weights |= {name: w for name, w in layer.items() if not experts or ".mlp." not in name}
    norms = (f"{prefix}.{name}" for name in _NORMS_OF_LAYER)
    weights |= reads_both(f"{prefix}.eh_proj", norms, states=0.5)
    if experts:
        weights[f"{prefix}.mlp.gate.weight"] = torch.randn(experts, hidden)
        weights[f"{prefix}.mlp.gate.expert_bias"] = torch.zeros(experts)
    every = [f"experts.{number}" for number in range(experts)]
    for expert in [*every, "shared_experts"] if experts else []:
        for name, shape in {
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }.items():
            weights[f"{prefix}.mlp.{expert}.{name}_proj.weight"] = 0.1 * torch.randn(shape)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


_NORMS_OF_LAYER = "enorm", "hnorm", "final_layernorm", "shared_head.norm"


def _layer(prefix: str, kind: str, is_recurrent: bool) -> dict[str, Tensor]:
    """Random weights of a layer, by their names in checkpoints."""
    hidden, inner, keys = SHARED["hidden_size"], SHARED["intermediate_size"], HEADS * SIZE
    plain, rotated, value, rank = (
        _LATENTS[name]
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    own: dict[str, tuple[int, ...]] = {
        "q_proj": (HEADS * (plain + rotated), hidden), "kv_a_layernorm": (rank,),
        "kv_a_proj_with_mqa": (rank + rotated, hidden),
        "kv_b_proj": (HEADS * (plain + value), rank),
        "dense" if kind in (LINEAR, LING) else "o_proj": (hidden, HEADS * value),
        **({"g_proj": (HEADS, hidden)} if kind == LING else {}),
    }  # fmt: skip
    if is_recurrent and kind == LINEAR:
        wide = HEADS * LINEAR_SIZE
        own = {
            "query_key_value": (3 * wide, hidden), "g_proj": (wide, hidden), "g_norm": (wide,),
            "query_layernorm": (LINEAR_SIZE,), "key_layernorm": (LINEAR_SIZE,),
            "dense": (hidden, wide),
        }  # fmt: skip
    elif is_recurrent:
        low_rank = {KIMI: ("f", "g"), K3: ("f",), LING: ()}[kind]
        own = {
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), (keys, hidden)),
            **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), (keys, 1, WIDTH)),
            **{f"{gate}_a_proj": (SIZE, hidden) for gate in low_rank},
            **{f"{gate}_b_proj": (keys, SIZE) for gate in low_rank},
            **{f"{gate}_proj": (keys, hidden) for gate in ("f", "g") if gate not in low_rank},
            "b_proj": (HEADS, hidden), "o_norm": (SIZE,), "o_proj": (hidden, keys),
        }  # fmt: skip
    attention = f"{prefix}.{'attention' if kind in (LINEAR, LING) else 'self_attn'}"
    found = {
        f"{place}.{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape)
        for place, of_place in ((prefix, shapes), (attention, own))
        for name, shape in of_place.items()
    }
    added = 0.2 if kind in (K3, LING) else 0.14  # the draft is wrong often enough
    for name, weight in found.items():
        if weight.ndim > 1:
            into_stream = re.search("o_proj|down_proj|dense", name)
            weight.mul_(0.5 if "conv1d" in name else added if into_stream else 0.15)
    if is_recurrent and kind != LINEAR:
        # Old checkpoints' form.
        found[f"{attention}.A_log"] = torch.empty(1, 1, HEADS, 1).uniform_(-1.0, 0.5)
        found[f"{attention}.dt_bias"] = torch.empty(keys).uniform_(-1.0, 0.5)
    return found


def run_kimi_as_on_gpus() -> None:
    """Test only: the layers of Kimi Linear in this process do here what they do on GPUs."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    _replace_kernels()
    utils.dispatch_cpu_unquantized_gemm = _keep_weight
    torch.cuda.Stream = _Stream
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def rehearse_kimi_on_gpus(kind: str) -> None:
    """`run_kimi_as_on_gpus` on the GPU engine without a GPU."""
    if kind in (KIMI, K3):  # as Kimi Linear's configuration sets it; layers are imported before
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    rehearse_on_gpus()
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext as Context

    _replace_kernels()
    RotaryEmbedding.forward_cuda = RotaryEmbedding.forward_native
    find = Context.compute_aligned_state_indices

    def find_states(self: Any, seq_lens: Tensor, num_reqs: int) -> Tensor:
        return find(self, seq_lens.as_subclass(_OnGpu), num_reqs)

    Context.compute_aligned_state_indices = find_states


def _replace_kernels() -> None:
    """Prompts are read by the plain recurrence, for plain engines and ours alike.

    Decoding is vLLM's kernel. Operators of the GPU build, which store latents, are in torch.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as layers
    from vllm.model_executor.models import bailing_moe_v3 as ling
    from vllm.models.kimi_k3.nvidia import kda as k3
    from vllm.models.kimi_k3.nvidia import mla
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    run_in_float32()
    os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"  # needs a library of the GPU build
    fused_recurrent.exp, fused_recurrent.log = exponential, logarithm
    kda.chunk_kda_with_fused_gate = read_prompts
    ling.chunk_kda, ling.fused_kda_gate = _read_decayed, _log_decays
    for module in (layers, k3, ling):
        module.gather_initial_states = _initial_states
        module.causal_conv1d_fn = convolve_prompts
        module.causal_conv1d_update = convolves_on_gpus()
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


class _OnGpu(Tensor):
    """Where vLLM finds states for Kimi K3, it asks that lengths be on a GPU."""

    is_cuda = True


class _Stream:
    """The model has one for latent layers with output gates; these have none."""


def read_prompts(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor,  # noqa: N803
    g_bias: Tensor, lower_bound: float | None, initial_state: Tensor, cu_seqlens: Tensor,
    out: None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stands for `chunk_kda_with_fused_gate`."""
    assert out is None
    assert options == {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    decays = _log_decays(raw_g.flatten(2), A_log, raw_g.shape[3], g_bias, lower_bound)
    return _read_decayed(q, k, v, decays, raw_beta.sigmoid(), initial_state, cu_seqlens)


def _log_decays(
    gates: Tensor, log_a: Tensor, head_k_dim: int, g_bias: Tensor, lower_bound: float | None
) -> Tensor:
    """Stands for `fused_kda_gate`, whose Triton kernel tries several forms on the GPU."""
    gates, rate = (gates + g_bias).unflatten(-1, (-1, head_k_dim)), log_a.exp().view(-1, 1)
    if lower_bound is None:
        return -rate * functional.softplus(gates)
    return lower_bound * torch.sigmoid(rate * gates)


def _read_decayed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
    cu_seqlens: Tensor, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stands for `chunk_kda`."""
    query, key = (
        each[0] / (each[0].square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k)
    )
    states, output, decays = initial_state.clone(), torch.zeros_like(v), g[0].exp()
    for request, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = states[request]
        for row in range(first, end):
            state = state * decays[row][:, None]
            missing = v[0, row] - (state @ key[row][..., None])[..., 0]
            update = beta[0, row][:, None] * missing
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
