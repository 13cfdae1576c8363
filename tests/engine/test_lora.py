"""Adapters on the target, on both runners: every request's tokens are those of plain vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams

from tests.support.engines import metric, running, sequoia, tokens_of
from tests.support.models import TARGET, prompts
from tests.support.on_v2 import call_on_v2

pytestmark = pytest.mark.engine

RANK = 8
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def save_adapter(path: Path, seed: int, scale: float = 0.05) -> str:
    """An adapter of the attention's projections that changes what the target says."""
    config = json.loads((Path(TARGET) / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * size, "v_proj": config["num_key_value_heads"] * size}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, rows in outputs.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (rows, RANK))):
                values = torch.randn(shape, generator=generator) * scale ** (part == "lora_B")
                weights[f"{module}.{part}.weight"] = values
    path.mkdir()
    save_file(weights, str(path / "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK,
        "target_modules": list(outputs), "bias": "none", "base_model_name_or_path": TARGET,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(path)


def generate_with_adapters(folder: str, max_tokens: int) -> dict[str, Any]:
    """Plain vLLM without adapters; and plain, and trees: none, one and another in turn.

    Greedy and seeded. The second time the prefix cache has each adapter's prompts.
    """
    from vllm.lora.request import LoRARequest

    first, second = (
        LoRARequest(name, number, save_adapter(Path(folder) / name, number))
        for number, name in enumerate(("first", "second"), start=1)
    )

    def generate(llm: Any, adapters: list | None, seed: int) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=0.0 if row % 2 else 0.8, seed=seed + row, max_tokens=max_tokens,
                ignore_eos=True,
            )
            for row in range(6)
        ]  # fmt: skip
        found = llm.generate(prompts(6), params, lora_request=adapters, use_tqdm=False)
        return tokens_of(found)

    answers: dict[str, Any] = {}
    for name, config in (("plain", None), ("trees", sequoia())):
        with running(config, **LORA) as llm:
            answers[name] = [generate(llm, [None, first, second] * 2, seed) for seed in (0, 0, 7)]
            if config is None:
                answers["without"] = generate(llm, None, 0)
            answers["accepted"] = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    return answers


def check(answers: dict[str, Any], max_tokens: int) -> None:
    # (On CPUs, vLLM's kernels give a request without an adapter the last one of the batch.)
    assert all(answers["plain"][0][row] != answers["without"][row] for row in (1, 2, 4, 5))
    assert answers["trees"] == answers["plain"]
    assert answers["accepted"] > max_tokens


def test_adapters_and_none_in_one_batch(tmp_path):
    check(generate_with_adapters(str(tmp_path), 40), 40)


@pytest.mark.slow
@pytest.mark.nightly
def test_adapters_and_none_in_one_batch_on_v2(tmp_path):
    check(call_on_v2(generate_with_adapters, tmp_path, folder=str(tmp_path), max_tokens=12), 12)
