"""A tiny target with latent attention (MLA) and an ordinary draft; what runs it as on GPUs here."""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.expert_layers import add_layer, reads_both
from tests.support.models import save_pair

VOCABULARY = 64
ON_GPUS: dict[str, Any] = {"attention_config": {"backend": "TRITON_MLA"}}
# AMX_MLA, which vLLM takes for latents where CPUs have AMX, knows neither float32 nor trees.
ON_CPUS: dict[str, Any] = {"attention_config": {"backend": "CPU_MLA"}}
SHARED: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
# As the published ones have it. Without it vLLM 0.32 rotates wrong numbers on CPUs: its operator
# there takes a query's heads for tokens.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
}  # fmt: skip


_KINDS: dict[str, dict[str, Any]] = {
    "DeepseekV3": {
        "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
    "Glm4MoeLite": {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse"]},
}  # fmt: skip
LATENT_KINDS = [*_KINDS]
CHOOSES = 128  # tokens that a sparse layer attends to
_INDEXER = {
    "first_k_dense_replace": 2, "index_topk": CHOOSES, "index_n_heads": 2, "index_head_dim": 128,
}  # fmt: skip
_SHARED_CHOICE = {"index_topk_pattern": "FS", "indexer_rope_interleave": True}
_OF_HY4 = {
    "layer_types": ["deepseek_sparse_attention"] * 2, "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
_KINDS |= {
    "DeepseekV32": _INDEXER, "GlmMoeDsa": {**_INDEXER, **_SHARED_CHOICE},
    "HYV4": {**_INDEXER, **_OF_HY4},
}  # fmt: skip
LONGCAT = "LongcatFlash"
_KINDS[LONGCAT] = {
    "num_hidden_layers": 4, "ffn_hidden_size": 64, "head_dim": 64, "moe_topk": 2,
    "zero_expert_num": 2, "zero_expert_type": "identity", "expert_ffn_hidden_size": 32,
    "routed_scaling_factor": 1.0, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}  # fmt: skip
SPARSE_KINDS = ["DeepseekV32", "GlmMoeDsa", "HYV4"]


def save_latent_pair(
    directory: Path, vocab: int = VOCABULARY, kind: str = "DeepseekV3", **own: Any
) -> tuple[str, str]:
    """A target of two layers, and a Llama as its draft. ``own``: other fields of the target.

    They share embeddings and head, which know each token's likeliest successor. The target's layers
    decide how often the draft is wrong.
    """
    import transformers

    torch.manual_seed(0)
    shared = {**SHARED, "vocab_size": vocab}
    fields: dict[str, Any] = {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 512,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "rope_parameters": YARN,
    }  # fmt: skip
    fields |= shared | _KINDS[kind] | own
    of_target = getattr(transformers, f"{kind}Config")(**fields)
    of_draft = LlamaConfig(**shared, num_hidden_layers=1, num_key_value_heads=1, head_dim=32)
    target = getattr(transformers, f"{kind}ForCausalLM")(of_target).float()
    draft = LlamaForCausalLM(of_draft).float()
    embeddings = torch.randn(vocab, SHARED["hidden_size"])
    for model in (target, draft):
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 0.15)
                if "sink" in parameter_name:
                    parameter.uniform_(0, 2)
                if model is draft and re.search("o_proj|down_proj", parameter_name):
                    parameter.mul_(0.1)
            model.model.embed_tokens.weight.copy_(embeddings)
            model.lm_head.weight.copy_(embeddings.roll(1, 0) * 0.2)
    paths = save_pair(directory, target, draft)
    if kind == "HYV4":
        _name_as_vllm_reads(Path(paths[0], "model.safetensors"))
    return paths


def _name_as_vllm_reads(file: Path) -> None:
    """Renames weights of Hy4, which transformers 5.19 saves by other names than vLLM's."""
    names = {
        r"hc_pre\.(hc_(?:attn|mlp)_layer)": r"\1.hc_pre", r"hc_pre\.hc_head": "hc_head",
        r"(mlp|experts)\.linear_gate": r"\1.gate_proj",
    }  # fmt: skip
    found = {}
    for name, weight in load_file(file).items():
        for old, new in names.items():
            name = re.sub(old, new, name)
        found[name] = weight
    save_file(found, file, metadata={"format": "pt"})


def save_latent_layer(directory: Path, vocab: int = VOCABULARY, kind: str = "DeepseekV3") -> str:
    """The same target with a layer of multi-token prediction (MTP): its last layer again."""
    last_has_experts = _KINDS["DeepseekV3"] | {"mlp_layer_types": ["dense", "sparse"]}
    target, _ = save_latent_pair(directory, vocab, kind, **last_has_experts)
    file = Path(target, "config.json")
    config = {**json.loads(file.read_text("utf-8")), "num_nextn_predict_layers": 1}
    file.write_text(json.dumps(config), "utf-8")
    last = f"model.layers.{config['num_hidden_layers']}"
    last_norm = "final_layernorm" if kind == "HYV4" else "shared_head.norm"
    names = f"{last}.enorm", f"{last}.hnorm", f"{last}.eh_proj", f"{last}.{last_norm}"
    add_layer(Path(target), "model.layers.1.", last, names, states=0.5)
    if kind == "HYV4":
        file = Path(target, "model.safetensors")
        weights = load_file(file)
        # The copied layer has no indexer of its own.
        weights |= {
            name.replace("model.layers.0", last): weight.clone() for name, weight in weights.items()
            if name.startswith("model.layers.0.self_attn.indexer")
        }  # fmt: skip
        weights[f"{last}.self_attn.learnable_sink_param"].fill_(5)  # drafts depend on it
        weights[f"{last}.self_attn.o_proj.weight"].mul_(8)
        save_file(weights, file, metadata={"format": "pt"})
    return target


def save_longcat_layer(directory: Path, vocab: int) -> str:
    """LongCat-Flash with its MTP layer, which has no experts: an attention of its own again."""
    target = Path(save_latent_pair(directory, vocab, LONGCAT)[0])
    file = target / "model.safetensors"
    weights, copied, prefix = load_file(file), "model.layers.1.", "model.mtp.layers.0"
    for name in [name for name in weights if re.search(r"experts\.[45]\.", name)]:
        del weights[name]  # experts that add nothing have no weights in checkpoints
    renamed = {
        "self_attn.1.": "self_attn.", "mlps.1.": "transformer_layer.mlp.",
        "input_layernorm.1.": "input_layernorm.",
        "post_attention_layernorm.1.": "post_attention_layernorm.",
    }  # fmt: skip
    weights |= {
        f"{prefix}.{new}{name.removeprefix(copied + old)}": weight.clone()
        for old, new in renamed.items()
        for name, weight in weights.items() if name.startswith(copied + old)
    }  # fmt: skip
    norms = f"{prefix}.enorm.m", f"{prefix}.hnorm.m", "model.mtp.norm"
    weights |= reads_both(f"{prefix}.eh_proj", norms, states=0.5)
    weights["model.mtp.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    return str(target)


def rehearse_on_gpus() -> None:
    """Test only, on the GPU engine without a GPU: prompts are read by the CPU's code.

    vLLM's TRITON_MLA decodes, in float32, which neither it nor the operator that writes latents
    knows.
    """
    from gpu_stand_in.platform import StandInPlatform
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # stand-ins first: backends import some of them by name
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl

    # The fused one is an operator of the GPU build.
    os.environ["VLLM_USE_FUSED_MOE_GROUPED_TOPK"] = "0"
    TritonMLABackend.supported_dtypes = [torch.float32]
    StandInPlatform.get_mla_prefill_backend_cls = classmethod(lambda *_: CPUSDPAMLAPrefillBackend)
    TritonMLAImpl.do_kv_cache_update = write_latents


def write_latents(
    _: Any, latents: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor,
    slots: torch.Tensor, *args: Any,
) -> None:  # fmt: skip
    """Writes both parts of each row to its slot; rows without one (-1) change nothing."""
    flat, slots = cache.view(-1, cache.shape[-1]), slots.flatten()
    rows = torch.cat((latents, positions.flatten(1)), dim=1)
    places = slots.clamp(min=0)
    flat.index_copy_(0, places, rows.where((slots >= 0)[:, None], flat[places]))
