"""A model's shape, read from its configuration as Hugging Face names things."""

from collections.abc import Mapping
from typing import Any

from sequoia_vllm.drafters.registry import DrafterKind, Fields, ShapeError, drafter
from sequoia_vllm.hardware.models import Experts, Latent, ModelShape, Recurrent, SharedBlocks

_UNMODELLED = {
    "block_configs": "its layers differ from each other",
    "ssm_cfg": "it has state-space layers",
    "moe_latent_size": "its experts read latents",
}
# Types whose configuration says nothing of it; every other type is taken to have a gate.
_UNGATED = frozenset({
    "apertus", "arcee", "gpt_neox", "nemotron", "nemotron_h", "persimmon", "phi", "starcoder2",
})  # fmt: skip
_BITS_BY_METHOD = {
    "fp8": 8, "fp8_per_tensor": 8, "fp8_per_channel": 8, "fp8_per_block": 8, "fbgemm_fp8": 8,
    "ptpc_fp8": 8, "modelopt": 8,
    "mxfp8": 8, "modelopt_mxfp8": 8, "modelopt_fp4": 4, "mxfp4": 4, "gpt_oss_mxfp4": 4, "nvfp4": 4,
    "awq": 4, "awq_marlin": 4, "bitsandbytes": 4,
}  # fmt: skip

# Methods that vLLM has no other layers for than experts.
_EXPERTS_ALONE = frozenset({"mxfp4", "gpt_oss_mxfp4"})


def read_shape(
    config: Any, name: str, quantization: str | None = None, kind: DrafterKind = "model"
) -> ModelShape:
    """The shape of the decoder that a configuration describes.

    Args:
        config: An object or mapping with Hugging Face's names; of several models the text model's.
        quantization: How vLLM quantizes the weights; None: as the configuration says.

    Raises:
        ShapeError: Something is missing, or not modelled; the message says what.
    """
    reader, drafts = Fields(config, name), drafter(kind)
    for key, reason in _UNMODELLED.items():
        if reader.value(key):
            raise ShapeError(f"{name} is not modelled: {reason}")
    latent = read_latent(reader)
    hidden = reader.count("hidden_size")
    heads = reader.count("num_attention_heads")
    layers = drafts.layers or len(_mlps(reader)) or reader.count("num_hidden_layers")
    first = reader.count("num_hidden_layers") if drafts.is_targets_own else 0
    experts = read_experts(reader, range(first, first + layers))
    weight_bytes, experts_alone = _quantization(reader, quantization)
    shared = None
    if reader.value("model_type") == "zamba2":
        shared = SharedBlocks(count=reader.count("num_mem_blocks", 1), width=2 * hidden)
    unused = experts.width if experts and experts.layers == layers else None
    if experts and weight_bytes and experts_alone:
        experts = experts.model_copy(update={"weight_bytes": weight_bytes})
        weight_bytes = None
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=reader.count("intermediate_size", unused),
        heads=heads,
        kv_heads=1 if latent else reader.count("num_key_value_heads", heads),
        head_size=reader.count(
            "head_dim", reader.value("attention_head_dim") or max(hidden // heads, 1)
        ),
        vocab=reader.count("vocab_size"),
        tied=bool(reader.value("tie_word_embeddings")),
        gated=reader.value("model_type") not in _UNGATED,
        layer_weight_bytes=weight_bytes,
        experts=experts,
        latent=latent,
        shared=shared,
        recurrent=None if drafts.layers else read_recurrent(reader, layers),
        head=drafts.head_shape(reader),
    )


def read_latent(config: Fields) -> Latent | None:
    """The sizes of latent attention (MLA) that a configuration describes; None: it has none.
    It refuses one that says too little, or whose model has whole keys and values in vLLM."""
    if not config.value("kv_lora_rank"):
        return None
    if config.value("model_type") == "minicpm3":
        raise ShapeError(f"{config.name} is not modelled: its keys and values have low ranks")
    return Latent(
        query_rank=config.value("q_lora_rank") or 0,
        rank=config.count("kv_lora_rank"),
        positions=config.value("qk_rope_head_dim") or 0,
        key=config.count("qk_nope_head_dim"),
        value=config.count("v_head_dim"),
    )


def _quantization(reader: Fields, method: str | None) -> tuple[float | None, bool]:
    """Bytes of a quantized weight, scales not counted (None: none is quantized), and whether a
    mixture's experts alone are quantized, and its attention is not."""
    stated = reader.value("quantization_config") or reader.value("compression_config") or {}
    if not isinstance(stated, Mapping):
        stated = stated.to_dict() if hasattr(stated, "to_dict") else vars(stated)
    if not stated and not method:
        return None, False
    name = str(method or stated.get("quant_method") or "").lower()
    bits = _stated_bits(stated, name)
    if bits is None:
        raise ShapeError(
            f"the weights of {reader.name} are quantized by {name or 'a method not named'}, "
            "whose size is not known"
        )
    left_out = stated.get("modules_to_not_convert") or stated.get("ignore") or ()
    keeps_attention = any("attn" in str(name) for name in left_out)
    return bits / 8, keeps_attention or bool({method, stated.get("quant_method")} & _EXPERTS_ALONE)


def _stated_bits(stated: Mapping[str, Any], method: str) -> float | None:
    """Bits of a weight; the most of them where parts of the model differ."""
    if stated.get("load_in_8bit"):
        return 8
    inner = stated.get("quantization")  # ModelOpt writes its fields one level down in its own file
    named = stated.get("quant_algo") or (isinstance(inner, Mapping) and inner.get("quant_algo"))
    algorithm = str(named or "").upper()
    if algorithm:
        return 4 if "FP4" in algorithm or "W4" in algorithm else 8 if "8" in algorithm else None
    found = [bits for bits in (stated.get("bits"), stated.get("w_bit")) if bits is not None]
    groups = stated.get("config_groups")  # of compressed-tensors, each with a format of its own
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found += [weights.get("num_bits")] if isinstance(weights, Mapping) else []
    numbers = [float(bits) for bits in found if isinstance(bits, (int, float)) and 0 < bits <= 16]
    if numbers:
        return max(numbers)
    return _BITS_BY_METHOD.get(method)


# Names of the same fields in different families.
_COUNT = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
)  # fmt: skip
_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts",
    "moe_topk", "moe_top_k", "moe_k",
)  # fmt: skip
_WIDTH = "moe_intermediate_size", "intermediate_size"
_SHARED_WIDTH = (
    "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip
_SHARED_COUNT = "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
_DENSE_FIRST = "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"
_EVERY = "decoder_sparse_step", "moe_layer_interval", "moe_layer_freq"
# Types whose layers do more than these fields say.
_UNMODELLED_EXPERTS = frozenset({"arctic", "doge", "jetmoe", "llama4_text", "zaya"})


def read_experts(config: Fields, layers: range) -> Experts | None:
    """The experts that a configuration describes in these layers; None: they are dense.
    It refuses one that says too little, or whose layers are not modelled."""
    count = _first(config, _COUNT)
    if not isinstance(count, int) or count < 2:
        return None
    sparse = sum(_is_sparse(config, layer) for layer in layers)
    if not sparse:
        return None
    name = f"{config.name} is a mixture of experts"
    if config.value("model_type") in _UNMODELLED_EXPERTS:
        raise ShapeError(f"{name} whose layers are not modelled")
    per_token, width = _first(config, _PER_TOKEN), _first(config, _WIDTH)
    if not isinstance(per_token, int) or not 1 <= per_token <= count:
        raise ShapeError(f"{name}, and its configuration does not say how many a token goes to")
    if not isinstance(width, int) or width < 1:
        raise ShapeError(f"{name}, and its configuration does not say how wide they are")
    shared = _first(config, _SHARED_WIDTH) or (_first(config, _SHARED_COUNT) or 0) * width
    if config.value("enable_moe_block"):  # the dense MLP stays beside the experts
        shared += config.count("intermediate_size")
    return Experts(count=count, per_token=per_token, width=width, layers=sparse, shared=shared)


# Numbers of key and of value heads, and sizes of a key and of a value.
_HEADS = (
    ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
     "linear_value_head_dim"),
    ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head"),
    ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim"),
    ("mamba_ngroups", "n_mamba_heads", "mamba_d_state", "mamba_headdim"),
)  # fmt: skip


def read_recurrent(config: Fields, layers: int) -> Recurrent | None:
    """The recurrent layers that a configuration describes; None: all layers only attend."""
    if isinstance(states := config.value("linear_attn_config"), Mapping):
        return _read_channels(Fields(states, config.name))
    if (group := config.value("layer_group_size")) and group > 1:
        return _read_group(config, layers, group)
    names = next((each for each in _HEADS if config.value(each[0]) is not None), None)
    width = config.value("conv_L_cache")
    if names is None and width is None:
        return None
    if names and (blocks := _blocks(config)):
        counts = {"layers": blocks.count("M"), "attending": blocks.count("*")}
        return Recurrent(**counts, **_heads(config, names))
    types, every = config.value("layer_types"), config.value("full_attention_interval") or 4
    if names == _HEADS[1] and not types:  # Falcon-H1: attention beside a state in each layer
        return Recurrent(layers=layers, attending=layers, **_heads(config, names))
    kinds = types or ["attention" if (i + 1) % every == 0 else "" for i in range(layers)]
    found = sum(kind not in ("attention", "full_attention") for kind in kinds[:layers])
    if not found:
        return None
    if names is None:  # a convolution's inputs are its state, and it has as many gates and outputs
        inputs = config.count("hidden_size")
        heads = {"value_heads": 1, "value": inputs, "key": width - 1}
        return Recurrent(layers=found, heads=max(1, inputs // (2 * width - 2)), **heads)
    return Recurrent(layers=found, **_heads(config, names))


def _read_channels(states: Fields) -> Recurrent | None:
    """Layers of Kimi Delta Attention, whose decays and output gates have a low rank."""
    if not (layers := states.value("kda_layers")):
        return None
    heads, size = states.count("num_heads"), states.count("head_dim")
    sizes = {"heads": heads, "value_heads": heads, "key": size, "value": size}
    return Recurrent(layers=len(layers), **sizes, gate_rank=size)


def _read_group(config: Fields, layers: int, group: int) -> Recurrent:
    """Layers of Ling 2.5 to 3: a group's last one attends, and Ling 3's behind the last group."""
    found = layers - layers // group
    if config.value("short_conv_kernel_size"):
        found -= layers % group
    heads, size = config.count("num_attention_heads"), config.count("head_dim")
    return Recurrent(layers=found, heads=heads, value_heads=heads, key=size, value=size)


def _heads(config: Fields, names: tuple[str, ...]) -> dict[str, int]:
    fields = ("heads", "value_heads", "key", "value")
    return {field: config.count(name) for field, name in zip(fields, names, strict=True)}


_BLOCKS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*",
    "mlp": "-", "moe": "E", "hybrid": "*-M",
}  # fmt: skip


def _blocks(config: Fields) -> str:
    """The parts of a Nemotron-H or Zamba 2: a state, attention, an MLP or experts; others: ""."""
    if config.value("model_type") not in ("nemotron_h", "zamba2"):
        return ""
    types = config.value("layers_block_type") or ()
    return config.value("hybrid_override_pattern") or "".join(_BLOCKS[each] for each in types)


def _mlps(config: Fields) -> str:
    """The parts that are an MLP or experts: what other models count as layers."""
    return _blocks(config).translate({ord("M"): None, ord("*"): None})


def _is_sparse(config: Fields, layer: int) -> bool:
    """Whether a layer has experts; without a word about it each has."""
    if mlps := _mlps(config):
        return mlps[layer : layer + 1] != "-"
    if types := config.value("mlp_layer_types"):
        return layer >= len(types) or types[layer] != "dense"
    if layer in (config.value("mlp_only_layers") or ()):
        return False
    if layer < (_first(config, _DENSE_FIRST) or 0):
        return False
    last = config.value("moe_layer_end_index")
    if last is not None and 0 <= last < layer:
        return False
    every = next((found for key in _EVERY if (found := config.value(key))), 1)
    if isinstance(every, (list, tuple)):
        return layer >= len(every) or bool(every[layer])
    return (layer + 1) % int(every) == 0


def _first(config: Fields, names: tuple[str, ...]) -> Any:
    """The first of these fields that is there; of a list, with a number a layer, the largest."""
    found = next((value for name in names if (value := config.value(name)) is not None), None)
    if isinstance(found, (list, tuple)):
        return max((entry for entry in found if isinstance(entry, int)), default=None)
    return found
