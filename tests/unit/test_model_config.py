"""Shapes read from configurations, as objects and as JSON."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.memory import memory_fit
from sequoia_vllm.hardware.device import known_devices
from sequoia_vllm.hardware.model_config import ShapeError, read_shape
from sequoia_vllm.hardware.models import model_classes
from sequoia_vllm.hardware.roofline import roofline_profile
from tests.support.models import MODELS

LLAMA_3 = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_3 = {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
    "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_2 = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip


def shape(config, **changes):
    return read_shape({**config, **changes}, "a/model")


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMA_3, "meta-llama/Llama-3.1-8B"), (QWEN_3, "Qwen/Qwen3-0.6B")],
)
def test_the_shapes_of_the_table(config, name):
    table = {s.name: s for c in model_classes().values() for s in (c.target, c.draft)}
    assert read_shape(config, name) == table[name]
    assert read_shape(SimpleNamespace(**config), name) == table[name]


def test_published_sizes():
    assert shape(QWEN_2).parameters == pytest.approx(494e6, rel=1e-3)
    assert shape(QWEN_2).head_size == 64
    # Both heads of the pair in the repository have a head_dim of their own.
    for model, parameters in (("target", 4163840), ("draft", 1672128)):
        config = json.loads((MODELS / model / "config.json").read_text())
        assert read_shape(config, model).parameters == pytest.approx(parameters, rel=1e-3)


def test_fields_that_may_be_missing():
    """Defaults: one key head per head, the width divided by heads, an own output matrix."""
    plain = {k: v for k, v in LLAMA_3.items() if k not in ("num_key_value_heads",)}
    del plain["tie_word_embeddings"]
    found = read_shape({**plain, "head_dim": None}, "m")
    assert (found.kv_heads, found.head_size, found.tied) == (32, 128, False)


def test_mlps_without_a_gate():
    with_gate = shape(LLAMA_3).parameters
    assert with_gate - shape(LLAMA_3, model_type="starcoder2").parameters == 32 * 4096 * 14336


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "a/model has no hidden_size"),
        ({"vocab_size": 0}, "has 0 as vocab_size"),
        ({"intermediate_size": [1, 2]}, r"has \[1, 2\] as intermediate_size"),
        ({"num_experts": 128}, "a/model is a mixture of experts"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"n_routed_experts": 256}, "mixture of experts"),
        ({"moe_num_experts": [64, 64]}, "mixture of experts"),
        ({"kv_lora_rank": 512}, "low-rank keys"),
        ({"block_configs": [{}]}, "layers differ"),
        ({"quantization_config": {"quant_method": "torchao"}}, "quantized by torchao"),
        ({"quantization_config": {"config_groups": {}}}, "a method not named"),
    ],
)
def test_what_cannot_be_modelled_is_said(changes, message):
    with pytest.raises(ShapeError, match=message):
        shape(LLAMA_3, **changes)


def test_one_expert_is_dense():
    assert shape(LLAMA_3, num_local_experts=1) == shape(LLAMA_3)


def compressed(*bits: int) -> dict:
    groups = {f"group_{n}": {"weights": {"num_bits": b}} for n, b in enumerate(bits)}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("stated", "weight_bytes"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5),
        ({"quant_method": "gptq", "bits": 8}, 1.0),
        ({"quant_method": "awq", "w_bit": 4}, 0.5),
        ({"quant_method": "awq"}, 0.5),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 1.0),
        (compressed(4), 0.5),
        (compressed(4, 8), 1.0),
    ],
)
def test_bytes_of_quantized_weights(stated, weight_bytes):
    found = shape(LLAMA_3, quantization_config=stated)
    assert found.layer_weight_bytes == weight_bytes
    as_object = SimpleNamespace(to_dict=lambda: stated)
    assert shape(LLAMA_3, quantization_config=as_object) == found


def test_quantized_while_loading():
    assert read_shape(LLAMA_3, "m", "fp8").layer_weight_bytes == 1.0
    with pytest.raises(ShapeError, match="quantized by gguf"):
        read_shape(LLAMA_3, "m", "gguf")


def test_quantized_weights_are_read_faster():
    """Layers only: the output matrix and the embedding stay as they are."""
    plain, small = shape(LLAMA_3), read_shape(LLAMA_3, "m", "awq")
    outside = 128256 * 4096 * 2
    assert small.matmul_bytes(2.0) - outside == (plain.matmul_bytes(2.0) - outside) / 4
    device = known_devices()["l4"]
    times = [
        roofline_profile(device, target, shape(QWEN_3)).target_forward[0].seconds[0]
        for target in (plain, small)
    ]
    assert 0.25 < times[1] / times[0] < 0.5
    weights = [memory_fit(device, target, shape(QWEN_3)).weights_bytes for target in (plain, small)]
    assert weights[0] - weights[1] == plain.layer_parameters * 1.5
