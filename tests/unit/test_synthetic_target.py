"""A synthetic target is larger, says so, and computes exactly what its source does."""

import json

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks.synthetic_target import SyntheticTargetError, checkpoint, write_synthetic_target
from benchmarks.synthetic_target.__main__ import app
from sequoia_vllm.measuring.provenance import synthetic_origin

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
KINDS = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}  # fmt: skip


def save_model(kind, folder):
    name, extra = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
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
def test_a_larger_hidden_size_preserves_the_function(source, tmp_path, times, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1 << 18)  # several files
    made = write_synthetic_target(str(source), tmp_path / "made", layers=4, hidden=64 * times)
    torch.testing.assert_close(logits(made.folder), logits(source), rtol=1e-4, atol=1e-4)
    assert len(list(made.folder.glob("*.safetensors"))) > 1
    config = AutoConfig.from_pretrained(made.folder)
    sizes = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert sizes == (64 * times, 4 * times, 2 * times)
    model = AutoModelForCausalLM.from_pretrained(made.folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == made.shape.parameters


@pytest.mark.parametrize(
    ("change", "hidden", "message"),
    [
        ({}, 100, "multiple of it, like 128"),
        ({}, 32, "multiple of it, like 64"),
        ({"architectures": ["GPT2LMHeadModel"]}, None,
         "architecture GPT2LMHeadModel; can use Llama"),
        ({"architectures": None}, None, "architecture none named"),
        ({"quantization_config": {"quant_method": "awq"}}, None, "is quantized"),
    ],
)  # fmt: skip
def test_what_cannot_be_grown_is_refused(tmp_path, change, hidden, message):
    source = save_model("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **change}))
    options = {} if hidden is None else {"hidden": hidden}
    with pytest.raises(SyntheticTargetError, match=message):
        write_synthetic_target(str(source), tmp_path / "made", layers=4, **options)


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
