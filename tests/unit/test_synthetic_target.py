"""A synthetic target is larger, says so, and computes exactly what its source does."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

from benchmarks.synthetic_target import SyntheticTargetError, write_synthetic_target
from benchmarks.synthetic_target.__main__ import app
from sequoia_vllm.measuring.provenance import synthetic_origin

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-untied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


def save_model(kind, folder):
    model_class, config_class, extra = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **extra))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=KINDS)
def source(request, tmp_path):
    return save_model(request.param, tmp_path / "source")


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(48).reshape(2, 24) * 7 % 96
    with torch.inference_mode():
        return model(tokens).logits


def test_the_function_is_preserved(source, tmp_path):
    made = write_synthetic_target(str(source), tmp_path / "made", layers=5, width=448)
    expected, found = logits(source), logits(made.folder)
    assert torch.equal(expected.argmax(-1), found.argmax(-1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("times", [2, 3, 5])
def test_a_larger_hidden_size_preserves_the_function(source, tmp_path, times):
    made = write_synthetic_target(str(source), tmp_path / "made", layers=4, hidden=64 * times)
    torch.testing.assert_close(logits(made.folder), logits(source), rtol=1e-4, atol=1e-4)
    config = AutoConfig.from_pretrained(made.folder)
    sizes = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert sizes == (64 * times, 4 * times, 2 * times)
    model = AutoModelForCausalLM.from_pretrained(made.folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == made.shape.parameters


@pytest.mark.parametrize(("hidden", "like"), [(100, 128), (32, 64)])
def test_a_hidden_size_that_is_no_multiple_is_refused(tmp_path, hidden, like):
    source = save_model("llama", tmp_path / "source")
    with pytest.raises(SyntheticTargetError, match=f"multiple of it, like {like}"):
        write_synthetic_target(str(source), tmp_path / "made", layers=4, hidden=hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel; can use Llama"),
        ({"architectures": None}, "architecture none named"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantized"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, change, message):
    source = save_model("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(SyntheticTargetError, match=message):
        write_synthetic_target(str(source), tmp_path / "made", layers=4)


def test_command(tmp_path):
    source = save_model("llama", tmp_path / "source")
    command = [str(source), str(tmp_path / "made"), "--params", "0.5M"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert synthetic_origin(tmp_path / "made")["parameters"] == pytest.approx(5e5, rel=0.02)
    assert "made: 0.5M parameters" in " ".join(done.stdout.split())
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "not empty" in again.output
