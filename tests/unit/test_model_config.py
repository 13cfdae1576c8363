"""Shapes read from configurations, as objects and as JSON."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.scaling import weights_bytes
from sequoia_vllm.hardware.device import known_devices
from sequoia_vllm.hardware.model_config import ShapeError, read_shape
from sequoia_vllm.hardware.models import model_classes
from sequoia_vllm.hardware.roofline import roofline_profile
from tests.support.families import MIXTURES, ZAMBA_2_7B
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
    ("config", "name"), [(LLAMA_3, "meta-llama/Llama-3.1-8B"), (QWEN_3, "Qwen/Qwen3-0.6B")]
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
    without_gate = shape(LLAMA_3, model_type="starcoder2").parameters
    assert shape(LLAMA_3).parameters - without_gate == 32 * 4096 * 14336


def test_fields_that_may_be_missing():
    """Defaults: one key head per head, the width divided by heads, an own output matrix."""
    left_out = {"num_key_value_heads", "tie_word_embeddings"}
    plain = {key: value for key, value in LLAMA_3.items() if key not in left_out}
    found = read_shape({**plain, "head_dim": None}, "m")
    assert (found.kv_heads, found.head_size, found.tied) == (32, 128, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "a/model has no hidden_size"),
        ({"vocab_size": 0}, "has 0 as vocab_size"),
        ({"intermediate_size": [1, 2]}, r"has \[1, 2\] as intermediate_size"),
        ({"num_experts": 128}, "a/model is a mixture of experts, .* how many a token goes to"),
        ({"moe_num_experts": [64, 64], "moe_topk": 128}, "how many a token goes to"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": "x"}, "how wide"),
        ({"num_experts": 8, "model_type": "arctic"}, "whose layers are not modelled"),
        ({"kv_lora_rank": 512, "model_type": "minicpm3"}, "values have low ranks"),
        ({"kv_lora_rank": 512}, "a/model has no qk_nope_head_dim"),
        ({"block_configs": [{}]}, "layers differ"),
        ({"quantization_config": {"quant_method": "torchao"}}, "quantized by torchao"),
        ({"quantization_config": {"config_groups": {}}}, "a method not named"),
    ],
)
def test_what_cannot_be_modelled_is_said(changes, message):
    with pytest.raises(ShapeError, match=message):
        shape(LLAMA_3, **changes)


@pytest.mark.parametrize("name", MIXTURES)
def test_published_sizes_of_mixtures(name):
    config, parameters, active = MIXTURES[name]
    found = read_shape(config, name)
    assert found.parameters == pytest.approx(parameters, rel=5e-3)
    assert found.matmul_parameters == pytest.approx(active, rel=2e-2)
    assert read_shape(SimpleNamespace(**config), name) == found


def test_one_expert_is_dense():
    assert shape(LLAMA_3, num_local_experts=1) == shape(LLAMA_3)
    every_layer = list(range(LLAMA_3["num_hidden_layers"]))
    assert shape(LLAMA_3, num_experts=8, mlp_only_layers=every_layer) == shape(LLAMA_3)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, 48),
        ({"mlp_only_layers": [0, 5]}, 46),
        ({"decoder_sparse_step": 2}, 24),
        ({"decoder_sparse_step": 5}, 9),
        ({"first_k_dense_replace": 3}, 45),
        ({"moe_layer_freq": [0] * 8 + [1] * 40, "decoder_sparse_step": None}, 40),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 47}, 47),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 11}, 10),
    ],
)
def test_layers_with_experts(changes, sparse):
    experts = shape(MIXTURES["Qwen3-30B-A3B"][0], **changes).experts
    assert (experts.layers, experts.count, experts.per_token) == (sparse, 128, 8)


def test_what_every_token_goes_to_adds_up():
    config = MIXTURES["Qwen3-30B-A3B"][0]
    assert shape(config, enable_moe_block=True).experts.shared == 6144
    shared = {"enable_moe_block": True, "shared_expert_intermediate_size": 1000}
    assert shape(config, **shared).experts.shared == 7144


def test_a_pass_reads_the_experts_that_its_rows_go_to():
    """One row reads its own, two share some, and many read all; computing follows the rows."""
    found = shape(MIXTURES["Mixtral-8x7B"][0])
    one_expert = 32 * 3 * 4096 * 14336 * 2
    read = [found.matmul_bytes(2.0, rows) for rows in (1, 2, 1000)]
    assert read[0] == 2 * found.matmul_parameters
    assert read[1] - read[0] == pytest.approx((8 * (1 - 0.75**2) - 2) * one_expert)
    assert read[2] - read[0] == pytest.approx(6 * one_expert)
    assert found.weights_bytes(2.0) == 2 * found.parameters


def test_experts_alone_may_be_quantized():
    """The attention of gpt-oss is in half precision."""
    config = MIXTURES["gpt-oss-20b"][0]
    found = shape(config)
    assert (found.layer_weight_bytes, found.experts.weight_bytes) == (None, 0.5)
    assert found.is_quantized
    attention = 24 * 2 * 2880 * 64 * (64 + 8) * 2
    assert found.layers_bytes(2.0) == pytest.approx(
        attention + 24 * (32 * 3 * 2880 * 2880 / 2 + 2880 * 32 * 2)
    )
    whole = shape(config, quantization_config={"quant_method": "fp8"})
    assert (whole.layer_weight_bytes, whole.experts.weight_bytes) == (1.0, None)
    alone = {"quant_method": "gptq", "bits": 4, "modules_to_not_convert": ["re:.*self_attn.*"]}
    assert shape(config, quantization_config=alone).experts.weight_bytes == 0.5


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
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, 0.5),
        (compressed(4), 0.5),
        (compressed(4, 8), 1.0),
    ],
)
def test_bytes_of_quantized_weights(stated, weight_bytes):
    found = shape(LLAMA_3, quantization_config=stated)
    assert found.layer_weight_bytes == weight_bytes
    as_object = SimpleNamespace(to_dict=lambda: stated)
    assert shape(LLAMA_3, quantization_config=as_object) == found


def test_quantized_weights_are_read_faster():
    """Layers only: the output matrix and the embedding stay as they are. Also while loading."""
    for method in ("fp8", "fp8_per_tensor"):
        assert read_shape(LLAMA_3, "m", method).layer_weight_bytes == 1.0
    with pytest.raises(ShapeError, match="quantized by gguf"):
        read_shape(LLAMA_3, "m", "gguf")
    plain, small = shape(LLAMA_3), read_shape(LLAMA_3, "m", "awq")
    outside = 128256 * 4096 * 2
    assert small.matmul_bytes(2.0) - outside == (plain.matmul_bytes(2.0) - outside) / 4
    device = known_devices()["l4"]
    times = [
        roofline_profile(device, target, shape(QWEN_3)).target_forward[0].seconds[0]
        for target in (plain, small)
    ]
    assert 0.25 < times[1] / times[0] < 0.5
    weights = [weights_bytes(target, shape(QWEN_3)) for target in (plain, small)]
    assert weights[0] - weights[1] == plain.layer_parameters * 1.5


def test_recurrent_layers_have_states_and_no_keys():
    config = MIXTURES["Qwen3-Next-80B-A3B"][0]
    found = shape(config)
    assert found.recurrent.layers == 36
    assert found.kv_values_per_token == 2 * 12 * 2 * 256
    assert found.recurrent.state_values * 4 == 72 << 20
    kinds = ["linear_attention"] * 20 + ["full_attention"] * 28
    assert shape(config, layer_types=kinds).recurrent.layers == 20
    assert shape(config, layer_types=["full_attention"] * 48).recurrent is None


GRANITE_4_TINY = {
    "model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 1536,
    "intermediate_size": 512, "shared_intermediate_size": 1024, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 100352, "tie_word_embeddings": True,
    "num_local_experts": 62, "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_n_groups": 1,
    "mamba_d_state": 128, "mamba_d_head": 64, "mamba_expand": 2,
    "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
}  # fmt: skip


def test_mamba2_layers_are_counted_as_recurrent():
    found = shape(GRANITE_4_TINY)
    assert (found.attention_layers, found.recurrent.layers) == (4, 36)
    assert found.recurrent.state_values == 36 * 48 * 64 * 128
    assert 6.5e9 < found.layer_parameters + 1536 * 100352 < 7.5e9
    in_parallel = shape({**GRANITE_4_TINY, "layer_types": None})  # as of Falcon-H1
    assert (in_parallel.attention_layers, in_parallel.recurrent.layers) == (40, 40)


def test_kimi_delta_attention_is_counted_as_recurrent():
    """Kimi Linear 48B-A3B: 20 of its 27 layers."""
    found = shape({
        "model_type": "kimi_linear", "num_hidden_layers": 27, "hidden_size": 2304,
        "intermediate_size": 9216, "num_attention_heads": 32, "head_dim": 72, "vocab_size": 163840,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 1024, "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        },
    })  # fmt: skip
    assert (found.attention_layers, found.recurrent.layers, found.experts.layers) == (7, 20, 26)
    assert found.recurrent.state_values == 20 * 32 * 128 * 128
    # Queries, keys, values and outputs of 4,096, two gates of rank 128, and strengths.
    layer = 2304 * (4 * 4096 + 32) + 2 * 128 * (2304 + 4096)
    assert found.recurrent.parameters(2304) == 20 * layer
    assert 48e9 < found.parameters < 50e9  # 48 by its card, 3 of them active
    assert 2.5e9 < found.matmul_parameters < 3.5e9


@pytest.mark.parametrize(("group", "width", "states"), [(5, None, 18), (5, 4, 16), (1, None, None)])
def test_the_last_layer_of_a_group_attends_in_ling_and_ring(group, width, states):
    """Of Ling 2.5 all others have states, of Ling 3 those of whole groups."""
    found = shape({
        "model_type": "bailing_hybrid", "num_hidden_layers": 22, "hidden_size": 2048,
        "intermediate_size": 5120, "num_attention_heads": 16, "head_dim": 128,
        "vocab_size": 157184, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "layer_group_size": group, "short_conv_kernel_size": width,
    })  # fmt: skip
    if states is None:
        assert found.recurrent is None
        return
    assert (found.attention_layers, found.recurrent.layers) == (22 - states, states)
    assert found.recurrent.state_values == states * 16 * 128 * 128


NEMOTRON_3_NANO = {
    "model_type": "nemotron_h", "num_hidden_layers": 52, "hidden_size": 2688, "head_dim": 128,
    "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2,
    "vocab_size": 131072, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_shared_experts": 1, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
    "n_groups": 8,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}  # fmt: skip


def test_each_layer_of_nemotron_h_is_a_state_attention_an_mlp_or_experts():
    found = shape(NEMOTRON_3_NANO)
    assert (found.attention_layers, found.recurrent.layers, found.experts.layers) == (6, 23, 23)
    assert 31e9 < found.parameters < 32.5e9  # 31.6 by the model's card, 3.2 to 3.6 of them active
    assert 3.0e9 < found.matmul_parameters < 3.7e9
    types = {"M": "mamba", "-": "mlp", "*": "attention"}
    dense = shape(
        {**NEMOTRON_3_NANO, "hybrid_override_pattern": None},
        layers_block_type=[types[block] for block in "M-M-M*-"],
    )
    assert (dense.layers, dense.recurrent.layers, dense.attention_layers) == (3, 3, 1)
    assert dense.experts is None
    with pytest.raises(ShapeError, match="latents"):
        shape(NEMOTRON_3_NANO, moe_latent_size=1024)


def test_blocks_that_layers_share_are_kept_once_and_read_in_each():
    """Zamba 2: 13 of 81 layers have one of two blocks of attention and MLP, beside their state."""
    found = shape(ZAMBA_2_7B)
    assert shape(ZAMBA_2_7B, num_mem_blocks=None).shared.count == 1
    assert (found.recurrent.layers, found.attention_layers, found.layers) == (81, 13, 13)
    assert found.recurrent.state_values == 81 * 112 * 64 * 64
    assert 7.0e9 < found.parameters < 7.5e9  # 7.4 by its card, with adapters
    block = 7168 * 7168 * 3 + 7168 * 3584 + 3 * 3584 * 14336
    kept = 2 * found.layer_parameters
    assert found.weights_bytes(2) == kept + 2 * 3584 * 32000
    assert found.matmul_bytes(2) == found.weights_bytes(2) + 2 * 11 * block


def test_short_convolutions_have_their_last_inputs_as_state():
    kinds = ["conv", "conv", "full_attention"] * 2
    config = {**QWEN_3, "layer_types": kinds, "num_hidden_layers": 6, "conv_L_cache": 3}
    found = shape(config)
    assert (found.attention_layers, found.recurrent.layers) == (2, 4)
    assert found.recurrent.state_values == 4 * 2 * 1024
    assert found.recurrent.parameters(1024) == pytest.approx(4 * 4 * 1024 * 1024, rel=0.01)


def test_a_context_costs_recurrent_layers_nothing():
    config, draft = MIXTURES["Qwen3-Next-80B-A3B"][0], model_classes()["7b-68m"].draft
    all_attend = shape(config, layer_types=["full_attention"] * 48)
    device = known_devices()["h100-sxm"].spec()

    def seconds(target, context):
        times = roofline_profile(device, target, draft, context_length=context, batch_sizes=(16,))
        return times.target_forward[0].seconds[0]  # of one token

    hybrid, dense = (
        seconds(target, 32768) - seconds(target, 1024) for target in (shape(config), all_attend)
    )
    assert hybrid == pytest.approx(dense / 4, rel=0.02)
    # The states are read and written in every pass, and once more in a commit.
    state = 16 * 4 * shape(config).recurrent.state_values
    fewer = shape(config, linear_num_value_heads=16)
    less = seconds(shape(config), 1024) - seconds(fewer, 1024)
    assert less > state / (device.bandwidth_gb_s * 1e9)
