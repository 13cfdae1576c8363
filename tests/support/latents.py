"""A tiny target with latent attention (MLA) and an ordinary draft; what runs it as on GPUs here."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 64
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
# As the published ones have it. Without it vLLM 0.32 rotates wrong numbers on CPUs: its operator
# there takes a query's heads for tokens.
_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
}  # fmt: skip


def save_latent_pair(directory: Path, scale: float = 1.0, dense: int = 1) -> tuple[str, str]:
    """A DeepSeek V3 of a dense layer and one of experts, and a Llama as its draft.

    They share embeddings and head, which know each token's likeliest successor. `scale`: weight of
    the target's layers, which decide how often the draft is wrong.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    target = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **_SHARED,
            num_hidden_layers=2,
            num_key_value_heads=2,
            q_lora_rank=16,
            kv_lora_rank=512,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            first_k_dense_replace=dense,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            moe_intermediate_size=32,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            rope_parameters=_ROPE,
        )
    ).float()
    draft = LlamaForCausalLM(
        LlamaConfig(**_SHARED, num_hidden_layers=1, num_key_value_heads=1, head_dim=32)
    ).float()
    embeddings = torch.randn(VOCABULARY, _SHARED["hidden_size"])
    for model, weight in ((target, scale), (draft, 0.1)):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 0.15)
                if "o_proj" in name or "down_proj" in name:
                    parameter.mul_(weight)
            model.model.embed_tokens.weight.copy_(embeddings)
            model.lm_head.weight.copy_(embeddings.roll(1, 0) * 0.2)
    paths = directory / "target", directory / "draft"
    for model, path in zip((target, draft), paths, strict=True):
        model.save_pretrained(path)
    return str(paths[0]), str(paths[1])
