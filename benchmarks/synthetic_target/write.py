"""Writes a synthetic target, and checks that it computes the same as its source.

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

from benchmarks.synthetic_target.checkpoint import (
    SourceCheckpoint,
    SyntheticTargetError,
    find_checkpoint,
    write_checkpoint,
)
from benchmarks.synthetic_target.shape import (
    SourceShape,
    SyntheticShape,
    explicit_shape,
    shape_for_parameters,
)
from sequoia_vllm.measuring.provenance import CONFIG_KEY

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("auto", "float32", "bfloat16", "float16")
Report = Callable[[str, int, int], None]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_INITIAL_STD = 0.02
# Share of the standard deviation of logits. Wider rows are summed in another order, which in
# float32 makes a thousandth of this.
TOLERANCE = 1e-3
_SEQUENCES, _LENGTH = 2, 32
# These are added to the residual stream: zero in added layers.
_OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
_WIDE_ROWS = ("mlp.gate_proj", "mlp.up_proj")
_WIDE_COLUMNS = "mlp.down_proj.weight"
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json",
    "chat_template*", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class SyntheticTarget:
    """A synthetic target that was written.

    Attributes:
        folder: Where it is.
        shape: Its layers, MLP width and parameters.
        source: Sizes of its source.
        dtype: Type of its weights.
    """

    folder: Path
    shape: SyntheticShape
    source: SourceShape
    dtype: str


def write_synthetic_target(
    source: str,
    folder: Path,
    *,
    parameters: float | None = None,
    layers: int | None = None,
    width: int | None = None,
    dtype: str = "auto",
    report: Report | None = None,
) -> SyntheticTarget:
    """Writes a larger copy of a model that computes the same logits.

    Args:
        source: Llama-, Qwen2- or Qwen3-type checkpoint in safetensors.
        folder: Where the copy goes; made if it is not there, must be empty.
        parameters: Parameters it shall have, within 2 %; or None, with:
        layers: Decoder layers in all; None keeps the source's.
        width: MLP width (``intermediate_size``); None keeps the source's.
        dtype: Type of its weights; "auto" keeps the source's.
        report: Progress, called with (what, layers done, all).

    Raises:
        SyntheticTargetError: If the model is of another architecture or quantized, the
            size cannot be met, or ``folder`` holds something.
    """
    origin = find_checkpoint(source)
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    check_source(config, source)
    checkpoint = SourceCheckpoint(origin)
    own = source_shape(config, checkpoint)
    shape = (
        explicit_shape(own, layers, width)
        if parameters is None
        else shape_for_parameters(own, parameters)
    )
    name = _dtype_name(config, checkpoint) if dtype == "auto" else dtype
    if folder.is_dir() and any(folder.iterdir()):
        raise SyntheticTargetError(f"{folder} is not empty: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, _tensors(checkpoint, own, shape, name, report))
    changed = _changed_config(config, own, shape, name)
    changed[CONFIG_KEY] = {
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
    (folder / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    return SyntheticTarget(folder, shape, own, name)


def check_source(config: dict[str, Any], model: str) -> None:
    """Checks that a synthetic target can be made of a checkpoint with this config.json.

    Raises:
        SyntheticTargetError: If it cannot; with the reason.
    """
    found = ", ".join(config.get("architectures") or []) or "none named"
    if found not in ARCHITECTURES:
        raise SyntheticTargetError(
            f"{model}: architecture {found}; can use {', '.join(ARCHITECTURES)}"
        )
    if config.get("quantization_config"):
        raise SyntheticTargetError(f"{model} is quantized: give the unquantized model")


def source_shape(config: dict[str, Any], checkpoint: SourceCheckpoint) -> SourceShape:
    """Counts a checkpoint's sizes from its tensors."""
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


def _parameter_names(config: dict[str, Any], checkpoint: SourceCheckpoint) -> list[str]:
    """Names of the tensors that are parameters: no buffers, no tied copy."""
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    return [
        name
        for name in checkpoint.names()
        if name not in tied and not name.endswith("rotary_emb.inv_freq")
    ]


def _is_widened(name: str) -> bool:
    return name.startswith(_WIDE_ROWS) or name == _WIDE_COLUMNS


def _dtype_name(config: dict[str, Any], checkpoint: SourceCheckpoint) -> str:
    named = config.get("dtype") or config.get("torch_dtype")
    stored = checkpoint.tensor("model.norm.weight").dtype
    return str(named or stored).removeprefix("torch.")


def _tensors(
    checkpoint: SourceCheckpoint,
    own: SourceShape,
    shape: SyntheticShape,
    dtype: str,
    report: Report | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of the synthetic target, layer by layer."""
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
                made = _own_tensor(part, checkpoint.tensor(name), size, random)
            else:
                made = _added_tensor(part, size, random)
            yield f"model.layers.{number}.{part}", made.to(kind)


def _widened(part: str, size: tuple[int, ...], width: int) -> tuple[int, ...]:
    if part.startswith(_WIDE_ROWS):
        return (width, *size[1:])
    return (size[0], width) if part == _WIDE_COLUMNS else size


def _own_tensor(
    part: str, tensor: torch.Tensor, size: tuple[int, ...], random: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Pads the source's tensor with what the wider MLP adds."""
    if tensor.shape == size:
        return tensor
    import torch

    padded = torch.zeros(size) if part == _WIDE_COLUMNS else random(size)
    padded[tuple(slice(length) for length in tensor.shape)] = tensor
    return padded


def _added_tensor(
    part: str, size: tuple[int, ...], random: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Makes a tensor of an added layer."""
    import torch

    if part.startswith(_OUTPUTS) or part.endswith(".bias"):
        return torch.zeros(size)
    return torch.ones(size) if "norm" in part else random(size)


def _random(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.empty(size).normal_(0, _INITIAL_STD, generator=generator)


def _changed_config(
    config: dict[str, Any], own: SourceShape, shape: SyntheticShape, dtype: str
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


@dataclass(frozen=True)
class Agreement:
    """Comparison of two models' float32 logits on the same random tokens.

    Attributes:
        difference: Largest difference of a logit.
        deviation: Standard deviation of the source's logits.
        positions: Positions compared.
    """

    difference: float
    deviation: float
    positions: int


def check_synthetic_target(source: str, folder: Path, dtype: str) -> Agreement:
    """Compares float32 logits, with the source's weights rounded as the synthetic target's are.

    Raises:
        SyntheticTargetError: If they differ by more than floating point explains.
    """
    expected = _logits(find_checkpoint(source), dtype)
    found = _logits(folder, dtype)
    difference = float((expected - found).abs().max())
    agreement = Agreement(difference, float(expected.std()), expected.shape[0] * expected.shape[1])
    if not difference <= TOLERANCE * agreement.deviation:  # so written, a NaN fails too
        raise SyntheticTargetError(
            f"{folder} does not compute what {source} does: logits differ by {difference:.3g} "
            f"(their standard deviation is {agreement.deviation:.3g}); please report this"
        )
    return agreement


def _logits(folder: Path, dtype: str) -> torch.Tensor:
    """float32 ``[2, 32, vocabulary]``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).float()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (_SEQUENCES, _LENGTH), generator=generator)
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens).logits
    return logits
