"""LoRA adapters with random weights, for the embedded target or another one."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.support.models import TARGET

RANK = 8


def two_adapters(folder: Path, **how: Any) -> list[LoRARequest]:
    """Adapters with weights of their own, see `save_adapter`."""
    names = enumerate(("first", "second"), start=1)
    return [LoRARequest(name, n, save_adapter(folder / name, n, **how)) for n, name in names]


def save_adapter(
    path: Path, seed: int, scale: float = 0.05, target: str = TARGET, layers: str = "model.layers"
) -> str:
    """An adapter of the attention's projections that changes what the target says."""
    config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * size, "v_proj": config["num_key_value_heads"] * size}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, rows in outputs.items():
            module = f"base_model.model.{layers}.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (rows, RANK))):
                values = torch.randn(shape, generator=generator) * scale ** (part == "lora_B")
                weights[f"{module}.{part}.weight"] = values
    path.mkdir()
    save_file(weights, str(path / "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK,
        "target_modules": list(outputs), "bias": "none", "base_model_name_or_path": target,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(path)
