"""A model's shape, read from its configuration as Hugging Face names things."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sequoia_vllm.drafters.fields import Fields, ShapeError
from sequoia_vllm.drafters.registry import DrafterKind, drafter
from sequoia_vllm.hardware.models import ModelShape

# How many experts, and low ranks of attention: none in a dense model.
_EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
)  # fmt: skip
_UNMODELLED = {
    "kv_lora_rank": "its attention has low-rank keys and values (MLA)",
    "block_configs": "its layers differ from each other",
    "ssm_cfg": "it has state-space layers",
}
# Types whose configuration says nothing of it; every other type is taken to have a gate.
_UNGATED = frozenset({"apertus", "arcee", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2"})
_BITS_BY_METHOD = {
    "fp8": 8, "fbgemm_fp8": 8, "ptpc_fp8": 8, "modelopt": 8,
    "mxfp8": 8, "modelopt_mxfp8": 8, "modelopt_fp4": 4, "mxfp4": 4, "nvfp4": 4,
    "awq": 4, "awq_marlin": 4, "bitsandbytes": 4,
}  # fmt: skip


def read_shape(
    config: Any, name: str, quantization: str | None = None, kind: DrafterKind = "model"
) -> ModelShape:
    """The shape of the dense decoder that a configuration describes.

    Args:
        config: An object or mapping with Hugging Face's names (``hidden_size``), that of
            the text model where there are several.
        name: For messages, and the shape's name.
        quantization: What vLLM quantizes weights with; None: what the configuration says.
        kind: What the model is.

    Raises:
        ShapeError: If a field is missing, or the model is not dense, or its weights have
            a size that is not known; says which.
    """
    reader, drafts = Fields(config, name), drafter(kind)
    if any(_more_than_one(reader.value(key)) for key in _EXPERTS):
        raise ShapeError(
            f"{name} is a mixture of experts: how many of them a tree reads is not modelled"
        )
    for key, reason in _UNMODELLED.items():
        if reader.value(key):
            raise ShapeError(f"{name} is not modelled: {reason}")
    hidden = reader.count("hidden_size")
    heads = reader.count("num_attention_heads")
    return ModelShape(
        name=name,
        layers=drafts.layers or reader.count("num_hidden_layers"),
        hidden=hidden,
        intermediate=reader.count("intermediate_size"),
        heads=heads,
        kv_heads=reader.count("num_key_value_heads", heads),
        head_size=reader.count("head_dim", max(hidden // heads, 1)),
        vocab=reader.count("vocab_size"),
        tied=bool(reader.value("tie_word_embeddings")),
        gated=reader.value("model_type") not in _UNGATED,
        layer_weight_bytes=_layer_weight_bytes(reader, quantization),
        head=drafts.head_shape(reader),
    )


def _more_than_one(experts: Any) -> bool:
    """Lists give a number for each layer."""
    if isinstance(experts, (list, tuple)):
        return any(_more_than_one(entry) for entry in experts)
    return isinstance(experts, int) and experts > 1


def _layer_weight_bytes(reader: Fields, quantization: str | None) -> float | None:
    """Bytes of a weight in the layers, scales not counted; None: not quantized."""
    stated = reader.value("quantization_config") or reader.value("compression_config")
    if stated is not None and not isinstance(stated, Mapping):
        stated = stated.to_dict() if hasattr(stated, "to_dict") else vars(stated)
    if not stated and not quantization:
        return None
    stated = stated or {}
    method = str(quantization or stated.get("quant_method") or "").lower()
    bits = _stated_bits(stated, method)
    if bits is None:
        raise ShapeError(
            f"the weights of {reader.name} are quantized by {method or 'a method not named'}, "
            "whose size is not known"
        )
    return bits / 8


def _stated_bits(stated: Mapping[str, Any], method: str) -> float | None:
    """Bits of a weight; the most of them where parts of the model differ."""
    if stated.get("load_in_8bit"):
        return 8
    algorithm = str(_nested(stated, "quant_algo") or "").upper()
    if algorithm:
        return 4 if "FP4" in algorithm or "W4" in algorithm else 8 if "8" in algorithm else None
    found = [bits for bits in (stated.get("bits"), stated.get("w_bit")) if bits is not None]
    found += _group_bits(stated)
    numbers = [float(bits) for bits in found if isinstance(bits, (int, float)) and 0 < bits <= 16]
    if numbers:
        return max(numbers)
    return _BITS_BY_METHOD.get(method)


def _nested(stated: Mapping[str, Any], key: str) -> Any:
    """ModelOpt writes its fields one level down in its own file."""
    inner = stated.get("quantization")
    return stated.get(key) or (inner.get(key) if isinstance(inner, Mapping) else None)


def _group_bits(stated: Mapping[str, Any]) -> Iterator[Any]:
    """Reads compressed-tensors: each group of layers has a format of its own."""
    groups = stated.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights.get("num_bits")
