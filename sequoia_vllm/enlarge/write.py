"""Writes a larger model that computes the same function as a small trained one.

Added decoder layers have zero output projections, so each adds nothing to the
residual stream; added MLP columns meet zero columns of ``down_proj``. Both cost
their full compute and memory traffic. Speeds measured on such a model are those
of a larger target whose draft agrees with it as often as the small pair does.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sequoia_vllm.enlarge.checkpoint import Checkpoint, find_checkpoint, write_checkpoint
from sequoia_vllm.enlarge.mark import MARK, GrowError
from sequoia_vllm.enlarge.shape import (
    GrownShape,
    SourceShape,
    explicit_shape,
    shape_for_parameters,
)

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("auto", "float32", "bfloat16", "float16")
Report = Callable[[str, int, int], None]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_INITIAL_STD = 0.02
# What is added to the residual stream: zero in added layers.
_OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
_WIDE_ROWS = ("mlp.gate_proj", "mlp.up_proj")
_WIDE_COLUMNS = "mlp.down_proj.weight"
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json",
    "chat_template*", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Growth:
    """A grown model.

    Attributes:
        folder: Where it is.
        shape: Its layers, MLP width and parameters.
        source: Sizes of the model it was grown from.
        dtype: Of its weights.
    """

    folder: Path
    shape: GrownShape
    source: SourceShape
    dtype: str


def grow_model(
    source: str,
    folder: Path,
    *,
    parameters: float | None = None,
    layers: int | None = None,
    width: int | None = None,
    dtype: str = "auto",
    report: Report | None = None,
) -> Growth:
    """Writes a larger copy of a model that computes the same.

    Args:
        source: Llama-, Qwen2- or Qwen3-type checkpoint in safetensors.
        folder: Where the copy goes; made if it is not there, must be empty.
        parameters: About how many it shall have; its shape then follows. Else:
        layers: Decoder layers in all; None: the source's.
        width: MLP width (``intermediate_size``); None: the source's.
        dtype: Of its weights; "auto": the source's.
        report: Progress, called with (what, layers done, all).

    Raises:
        GrowError: If the model is of another architecture or quantized, the
            size cannot be met, or ``folder`` holds something.
    """
    origin = find_checkpoint(source)
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    check_growable(config, source)
    checkpoint = Checkpoint(origin)
    own = source_shape(config, checkpoint)
    shape = (
        explicit_shape(own, layers, width)
        if parameters is None
        else shape_for_parameters(own, parameters)
    )
    name = _dtype_name(config, checkpoint) if dtype == "auto" else dtype
    if folder.is_dir() and any(folder.iterdir()):
        raise GrowError(f"{folder} is not empty: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, _tensors(checkpoint, own, shape, name, report))
    grown = _grown_config(config, own, shape, name)
    grown[MARK] = {
        "from": source,
        "from_sha256": checkpoint.sha256(),
        "from_layers": own.layers,
        "from_intermediate_size": own.width,
        "layers": shape.layers,
        "intermediate_size": shape.width,
        "parameters": shape.parameters,
    }
    # Last, so that an interrupted run leaves nothing that loads.
    _copy_tokenizer(origin, folder)
    (folder / "config.json").write_text(json.dumps(grown, indent=2) + "\n", encoding="utf-8")
    return Growth(folder, shape, own, name)


def check_growable(config: dict[str, Any], model: str) -> None:
    """Whether the checkpoint with this config.json can be grown.

    Raises:
        GrowError: If not, with the reason.
    """
    found = ", ".join(config.get("architectures") or []) or "none named"
    if found not in ARCHITECTURES:
        raise GrowError(f"{model}: architecture {found}; can grow {', '.join(ARCHITECTURES)}")
    if config.get("quantization_config"):
        raise GrowError(f"{model} is quantized: grow the unquantized model")


def source_shape(config: dict[str, Any], checkpoint: Checkpoint) -> SourceShape:
    """Sizes of a checkpoint, counted from its tensors."""
    layers, width = int(config["num_hidden_layers"]), int(config["intermediate_size"])
    outside = per_layer = per_column = 0
    for name in _parameter_names(config, checkpoint):
        shape = checkpoint.shape(name)
        count = 1
        for length in shape:
            count *= length
        layer = _LAYER.fullmatch(name)
        if layer is None:
            outside += count
        elif layer[1] == "0" and _is_widened(layer[2]):
            per_column += count // width
        elif layer[1] == "0":
            per_layer += count
    return SourceShape(layers, width, outside, per_layer, per_column)


def _parameter_names(config: dict[str, Any], checkpoint: Checkpoint) -> list[str]:
    """Names of the tensors that are parameters: not buffers, not a tied copy."""
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    return [
        name
        for name in checkpoint.names()
        if name not in tied and not name.endswith("rotary_emb.inv_freq")
    ]


def _is_widened(name: str) -> bool:
    return name.startswith(_WIDE_ROWS) or name == _WIDE_COLUMNS


def _dtype_name(config: dict[str, Any], checkpoint: Checkpoint) -> str:
    named = config.get("dtype") or config.get("torch_dtype")
    stored = checkpoint.tensor("model.norm.weight").dtype
    return str(named or stored).removeprefix("torch.")


def _tensors(
    checkpoint: Checkpoint, own: SourceShape, shape: GrownShape, dtype: str, report: Report | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the grown model, layer by layer."""
    import torch

    kind = getattr(torch, dtype)
    random = partial(_random, generator=torch.Generator().manual_seed(0))
    in_layers: dict[int, dict[str, str]] = {}
    for name in checkpoint.names():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            yield name, checkpoint.tensor(name).to(kind)
        elif not layer[2].endswith("inv_freq"):
            in_layers.setdefault(int(layer[1]), {})[layer[2]] = name
    for number in range(shape.layers):
        if report is not None:
            report("layers", number, shape.layers)
        parts = in_layers[min(number, own.layers - 1)]
        for part, name in parts.items():
            size = _widened(part, checkpoint.shape(name), shape.width)
            if number < own.layers:
                grown = _own_tensor(part, checkpoint.tensor(name), size, random)
            else:
                grown = _added_tensor(part, size, random)
            yield f"model.layers.{number}.{part}", grown.to(kind)


def _widened(part: str, size: tuple[int, ...], width: int) -> tuple[int, ...]:
    if part.startswith(_WIDE_ROWS):
        return (width, *size[1:])
    return (size[0], width) if part == _WIDE_COLUMNS else size


def _own_tensor(
    part: str, tensor: torch.Tensor, size: tuple[int, ...], random: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """The source's tensor, and beside it what its wider MLP adds."""
    if tensor.shape == size:
        return tensor
    import torch

    grown = torch.zeros(size) if part == _WIDE_COLUMNS else random(size)
    grown[tuple(slice(length) for length in tensor.shape)] = tensor
    return grown


def _added_tensor(
    part: str, size: tuple[int, ...], random: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """A tensor of an added layer."""
    import torch

    if part.startswith(_OUTPUTS) or part.endswith(".bias"):
        return torch.zeros(size)
    return torch.ones(size) if "norm" in part else random(size)


def _random(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.empty(size).normal_(0, _INITIAL_STD, generator=generator)


def _grown_config(
    config: dict[str, Any], own: SourceShape, shape: GrownShape, dtype: str
) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.width,
        "torch_dtype" if "torch_dtype" in config else "dtype": dtype,
    }
    if config.get("layer_types"):
        kinds = config["layer_types"]
        changes["layer_types"] = kinds + [kinds[-1]] * (shape.layers - own.layers)
    return {**config, **changes}


def _copy_tokenizer(origin: Path, folder: Path) -> None:
    for pattern in _TOKENIZER_FILES:
        for path in origin.glob(pattern):
            if path.is_file():
                shutil.copy(path, folder / path.name)
            else:
                shutil.copytree(path, folder / path.name)
