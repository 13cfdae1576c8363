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
            wide = torch.cat([growth.reading_first(block) for block in tensor.split(hidden, 1)], 1)
            if name == "fc.weight":
                yield name, wide.repeat(growth.times, 1)
            else:  # more heads, whose outputs meet zeros of ``o_proj``
                added = [wide.roll(place + 1, 0) for place in range(growth.times - 1)]
                yield name, torch.cat([wide, *added])
        else:
            yield name, growth.grown(part, tensor)
