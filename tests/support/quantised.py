"""Quantised copies of a model, in the formats that vLLM's CPU kernels read."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32


def _int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Each row has its scale; a row is what one output is computed from."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def _int4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Each group of a row has its scale; eight weights plus 8 lie in an int32, the first lowest."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, GROUP)
    scale = groups.abs().amax(dim=2) / 7
    values = (groups / scale[:, :, None]).round().clamp(-8, 7).view(rows, -1, 8).long() + 8
    packed = (values << torch.arange(0, 32, 4)).sum(dim=2)
    stem = name.removesuffix("weight")
    return {
        f"{stem}weight_packed": packed.to(torch.uint32).view(torch.int32),
        f"{stem}weight_scale": scale.to(torch.bfloat16),
        f"{stem}weight_shape": torch.tensor([rows, columns]),
    }


@dataclass(frozen=True)
class Quantised:
    """How weights are quantised, what their configuration says, and the dtype of the rest."""

    weights: Callable[[str, Tensor], dict[str, Tensor]]
    scheme: dict[str, Any]
    format: str
    dtype: str


_SYMMETRIC = {"type": "int", "symmetric": True}
QUANTISED = {
    "int8": Quantised(
        _int8,
        {
            "weights": {**_SYMMETRIC, "num_bits": 8, "strategy": "channel", "dynamic": False},
            "input_activations": {
                **_SYMMETRIC, "num_bits": 8, "strategy": "token", "dynamic": True,
            },
        },
        "int-quantized",
        "float32",
    ),
    "int4": Quantised(
        _int4,
        {"weights": {**_SYMMETRIC, "num_bits": 4, "strategy": "group", "group_size": GROUP}},
        "pack-quantized",
        "bfloat16",
    ),
}  # fmt: skip


def save_quantised(path: Path, model: str, how: str) -> str:
    """A copy of a Llama whose linear layers are quantised as compressed-tensors has it.

    Where vLLM has no kernel for it (4 bits need AVX-512), the test is skipped.
    """
    from vllm import _custom_ops  # noqa: F401 (loads the kernels)

    if how == "int4" and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("needs AVX-512: vLLM's kernel for 4-bit weights")
    method = QUANTISED[how]
    shutil.copytree(model, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": method.format,
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **method.scheme}},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= method.weights(name, tensor.float())
        else:
            tensors[name] = tensor
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)
