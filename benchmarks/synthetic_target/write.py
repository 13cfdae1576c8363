"""Writes a synthetic target, which computes the same as its source.

Added decoder layers have zero output projections, so each adds nothing to the
residual stream; added heads and MLP columns meet zero columns of ``o_proj`` and ``down_proj``. A
larger hidden size holds copies of the source's. All cost their full compute and memory traffic.
Speeds measured on such a model are those of a larger target whose draft agrees with it as often as
the small pair does.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.synthetic_target.checkpoint import (
    SourceCheckpoint,
    SyntheticTargetError,
    copy_tokenizer,
    find_checkpoint,
    make_new,
    write_checkpoint,
)
from benchmarks.synthetic_target.tensors import Growth, is_of_width
from sequoia_vllm.measuring.provenance import CONFIG_KEY

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Report = Callable[[str, int, int], None]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# MLP widths are multiples of this: matrix kernels and tensor parallelism like them.
WIDTH_STEP = 64
# Largest deviation from the number of parameters asked for.
TOLERANCE = 0.02
# Models in use have about 24 layers at 1B parameters, 42 at 8B and 75 at 70B.
_LAYERS_AT_1B, _DEPTH_EXPONENT = 24, 0.27
_MOST_LAYERS = 512


@dataclass(frozen=True)
class SourceShape:
    """Sizes of the source model, as parameter counts."""

    layers: int
    width: int  # MLP width (``intermediate_size``)
    hidden: int  # hidden size; the counts below are for it
    outside: int  # parameters outside the layers: embeddings, final norm
    per_layer: int  # parameters of a layer outside the columns of its MLP
    per_column: int  # parameters that one more column of MLP width adds to a layer

    def parameters(self, layers: int, width: int) -> int:
        """Parameters with this many layers of this MLP width."""
        return self.outside + layers * (self.per_layer + width * self.per_column)


@dataclass(frozen=True)
class SyntheticShape:
    """Decoder layers, MLP width, hidden size and parameters of a synthetic target."""

    layers: int
    width: int
    hidden: int
    parameters: int


def explicit_shape(source: SourceShape, layers: int | None, width: int | None) -> SyntheticShape:
    """Returns the shape with these sizes; None keeps the source's own."""
    layers, width = layers or source.layers, width or source.width
    for what, asked, own in (("layers", layers, source.layers), ("width", width, source.width)):
        if asked < own:
            raise SyntheticTargetError(
                f"{asked} {what}: the source already has {own}, and sizes are only added to; give "
                f"{own} or more"
            )
    return SyntheticShape(layers, width, source.hidden, source.parameters(layers, width))


def shape_for_parameters(source: SourceShape, parameters: float) -> SyntheticShape:
    """A shape of about this many parameters, as deep as models of that size usually are. The MLP's
    width takes up what depth and the hidden size do not."""
    own = source.parameters(source.layers, source.width)
    if parameters < own * (1 - TOLERANCE):
        raise SyntheticTargetError(
            f"{parameters:.4g} parameters: the source already has {own:,}; give more"
        )
    usual = _LAYERS_AT_1B * (parameters / 1e9) ** _DEPTH_EXPONENT

    def rank(shape: SyntheticShape) -> tuple[bool, float]:
        missed = abs(shape.parameters / parameters - 1)
        from_usual = abs(math.log(shape.layers / usual))
        return missed > TOLERANCE, missed if missed > TOLERANCE else from_usual

    def with_layers(layers: int) -> SyntheticShape:
        columns = (parameters - source.outside) / layers - source.per_layer
        width = round(columns / source.per_column / WIDTH_STEP) * WIDTH_STEP
        return explicit_shape(source, layers, max(width, source.width))

    best = min(map(with_layers, range(source.layers, _MOST_LAYERS)), key=rank)
    if rank(best)[0]:
        raise SyntheticTargetError(
            f"{parameters:.4g} parameters cannot be met within {TOLERANCE:.0%}: the nearest shape "
            f"has {best.parameters:,} ({best.layers} layers, MLP width {best.width}); ask for "
            "that, or give --layers and --width"
        )
    return best


@dataclass(frozen=True)
class SyntheticTarget:
    """A synthetic target that was written."""

    folder: Path
    shape: SyntheticShape
    source: SourceShape
    dtype: str


def write_synthetic_target(
    source: str, folder: Path, *, parameters: float | None = None, layers: int | None = None,
    width: int | None = None, hidden: int | None = None, dtype: Dtype = "auto",
    report: Report = lambda what, done, total: None,
) -> SyntheticTarget:  # fmt: skip
    """Writes a larger copy of a model that computes the same logits, to a new or empty folder.

    The source is a Llama-, Qwen2- or Qwen3-type checkpoint in safetensors. The copy has so many
    ``parameters``, within 2 %; or these layers, MLP width (``intermediate_size``) and hidden size,
    a multiple of the source's. None keeps the source's own, as "auto" its dtype.
    """
    origin = find_checkpoint(source)
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    check_source(config, source)
    checkpoint = SourceCheckpoint(origin)
    own = source_shape(config, checkpoint)
    times = _times(own.hidden, own.hidden if hidden is None else hidden)
    wider = source_shape(config, checkpoint, times)
    shape = (
        explicit_shape(wider, layers, width)
        if parameters is None
        else shape_for_parameters(wider, parameters)
    )
    stored = config.get("dtype") or config.get("torch_dtype")
    stored = stored or checkpoint.tensor("model.norm.weight").dtype
    name = str(stored).removeprefix("torch.") if dtype == "auto" else dtype
    make_new(folder)
    write_checkpoint(folder, _tensors(checkpoint, own, shape, name, report))
    changed = _changed_config(config, own, shape, name)
    changed[CONFIG_KEY] = {
        "from": source, "from_sha256": checkpoint.sha256(), "from_layers": own.layers,
        "from_intermediate_size": own.width, "from_hidden_size": own.hidden, "layers": shape.layers,
        "intermediate_size": shape.width, "hidden_size": shape.hidden,
        "parameters": shape.parameters,
    }  # fmt: skip
    # Last, so that an interrupted run leaves nothing that loads.
    copy_tokenizer(origin, folder)
    (folder / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    return SyntheticTarget(folder, shape, own, name)


def check_source(config: dict[str, Any], model: str) -> None:
    """Checks that a synthetic target can be made of a checkpoint with this config.json."""
    found = ", ".join(config.get("architectures") or []) or "none named"
    if found not in ARCHITECTURES:
        raise SyntheticTargetError(
            f"{model}: architecture {found}; can use {', '.join(ARCHITECTURES)}"
        )
    if config.get("quantization_config"):
        raise SyntheticTargetError(f"{model} is quantized: give the unquantized model")


def _times(own: int, hidden: int) -> int:
    if hidden < own or hidden % own:
        raise SyntheticTargetError(
            f"hidden size {hidden}: the source has {own}, and copies of it are added; give a "
            f"multiple of it, like {max(1, -(-hidden // own)) * own}"
        )
    return hidden // own


def source_shape(
    config: dict[str, Any], checkpoint: SourceCheckpoint, times: int = 1
) -> SourceShape:
    """Counts a checkpoint's sizes from its tensors, with ``times`` its hidden size."""
    layers, width = int(config["num_hidden_layers"]), int(config["intermediate_size"])
    growth = Growth(times, width)
    outside = per_layer = per_column = 0
    tied = "lm_head.weight" if config.get("tie_word_embeddings") else None
    for name in checkpoint.names():
        if name == tied or name.endswith("rotary_emb.inv_freq"):
            continue  # a tied copy, or a buffer
        own = checkpoint.shape(name)
        layer = _LAYER.fullmatch(name)
        if layer is None:
            outside += math.prod(growth.outside(own))
        elif layer[1] == "0" and is_of_width(layer[2]):
            per_column += math.prod(growth.size(layer[2], own)) // width
        elif layer[1] == "0":
            per_layer += math.prod(growth.size(layer[2], own))
    hidden = int(config["hidden_size"]) * times
    return SourceShape(layers, width, hidden, outside, per_layer, per_column)


def _tensors(
    checkpoint: SourceCheckpoint,
    own: SourceShape,
    shape: SyntheticShape,
    dtype: str,
    report: Report,
) -> Iterator[tuple[str, torch.Tensor]]:
    kind = getattr(torch, dtype)
    growth = Growth(shape.hidden // own.hidden, shape.width)
    in_layers: dict[int, dict[str, str]] = {}
    for name in checkpoint.names():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            yield name, growth.grown_outside(name, checkpoint.tensor(name).to(kind))
        elif not layer[2].endswith("inv_freq"):
            in_layers.setdefault(int(layer[1]), {})[layer[2]] = name
    for number in range(shape.layers):
        report("layers", number, shape.layers)
        parts = in_layers[min(number, own.layers - 1)]
        for part, name in parts.items():
            if number < own.layers:
                made = growth.grown(part, checkpoint.tensor(name).to(kind))
            else:
                made = growth.added(part, checkpoint.shape(name), kind)
            yield f"model.layers.{number}.{part}", made


def _changed_config(
    config: dict[str, Any], own: SourceShape, shape: SyntheticShape, dtype: str
) -> dict[str, Any]:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    times = shape.hidden // own.hidden
    changes: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.width,
        "hidden_size": shape.hidden,
        "num_attention_heads": heads * times,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads) * times,
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "torch_dtype" if "torch_dtype" in config else "dtype": dtype,
    }
    if config.get("layer_types"):
        kinds = config["layer_types"]
        changes["layer_types"] = kinds + [kinds[-1]] * (shape.layers - own.layers)
    return {**config, **changes}
