"""An EAGLE-3 or DFlash head for an enlarged target, from one for its source.

The target's hidden states are copies of its source's side by side (`synthetic_target.tensors`).
The head's grow alike: its norms divide by the same numbers, its projections read the first copy,
and its MLP and attention are as large as those of a head for a model of 8B parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.synthetic_target.checkpoint import (
    SourceCheckpoint,
    find_checkpoint,
    make_new,
    write_checkpoint,
)
from benchmarks.synthetic_target.tensors import Growth

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"midlayer\.|layers\.\d+\.")
_AS_THEY_ARE = ("d2t", "t2d")
_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def write_grown_head(head: Path, folder: Path, times: int, width: int) -> None:
    """Writes the head with ``times`` the hidden size and heads, and an MLP of ``width`` columns.

    Args:
        head: A checkpoint of such a head, with a hidden size and heads like the source's.
        folder: Where the new one goes; made if it is not there, must be empty.
        times: The enlarged target's hidden size over the source's.
        width: MLP width (``intermediate_size``).
    """
    config = json.loads((head / "config.json").read_text("utf-8"))
    checkpoint = SourceCheckpoint(find_checkpoint(str(head)))
    make_new(folder)
    write_checkpoint(folder, _tensors(checkpoint, config, Growth(times, width)))
    grown = {
        **config,
        "intermediate_size": width,
        **{
            name: config[name] * times
            for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        },
    }
    (folder / "config.json").write_text(json.dumps(grown, indent=2) + "\n", "utf-8")


def _tensors(
    checkpoint: SourceCheckpoint, config: dict[str, Any], growth: Growth
) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    hidden = config["hidden_size"]
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        part = _LAYER.sub("", name)
        if name in _AS_THEY_ARE:
            yield name, tensor
        elif name in ("norm.weight", "lm_head.weight"):
            yield name, growth.grown_outside(f"model.{name}", tensor)
        elif name == "fc.weight" or part.startswith(_INPUTS):
            # These read several hidden states side by side, each of them with its copies.
            blocks = [_read_first(block, growth) for block in tensor.split(hidden, 1)]
            wide = torch.cat(blocks, 1)
            if name == "fc.weight":
                yield name, wide.repeat(growth.times, 1)
            else:
                yield name, _more_rows(wide, growth.times)
        elif part in ("hidden_norm.weight", "input_layernorm.weight"):
            yield name, tensor.repeat(growth.times)
        else:
            yield name, growth.grown(part, tensor)


def _read_first(block: torch.Tensor, growth: Growth) -> torch.Tensor:
    """Columns for all copies of a hidden state, of which the first alone counts."""
    import torch

    others = growth.random((len(block), block.shape[1] * ((growth.times - 1) // 2)), block.dtype)
    rest = block.new_zeros(len(block), block.shape[1] * ((growth.times - 1) % 2))
    return torch.cat([block, others, -others, rest], 1)


def _more_rows(wide: torch.Tensor, times: int) -> torch.Tensor:
    """More heads, whose outputs meet zeros of ``o_proj``."""
    import torch

    added = [wide.roll(place + 1, 0) for place in range(times - 1)]
    return torch.cat([wide, *added])
