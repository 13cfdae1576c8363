"""From data and a target to a folder with a trained head, as vLLM reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from dflash import DFlash
from eagle3 import Eagle3
from errors import PairError
from frozen_target import Frozen, FrozenTarget
from head_data import read_head_data
from pair import Listener
from safetensors.torch import load_file, save_file
from token_data import TokenArray, Windows
from training import Schedule, ValidationPoint, train
from transformers import LlamaConfig

# Of the target, the embedding being 0. vLLM's own choice is (2, n // 2, n - 3)
# for n layers: of four, the second twice and the first.
LAYERS = (1, 2, 4)
CHECKPOINT = "resume.pt"


class Drafter(Protocol):
    """Whatever drafts greedily."""

    def draft(
        self, target: FrozenTarget, tokens: torch.Tensor, frozen: Frozen, count: int
    ) -> torch.Tensor:
        """The most likely drafts after every prefix of one text, ``[length - 1, count]``.

        Row s drafts the tokens from s + 2 on.
        """


@dataclass(frozen=True)
class HeadRecipe:
    """Everything but the data and the target that decides what a head becomes.

    Attributes:
        kind: A key of ``KINDS``.
        mlp: Size of a layer's MLP.
        draft_vocab_size: Tokens that can be drafted, if the kind has a vocabulary of its own.
        sequence_length: Tokens in a sequence.
        peak_learning_rate: The highest.
        muon: Whether matrices learn by Muon and not by AdamW.
        schedule: ``steps`` 0 is one pass over the training tokens.
        device: Where to train.
    """

    kind: str
    mlp: int
    draft_vocab_size: int
    sequence_length: int
    peak_learning_rate: float
    muon: bool
    schedule: Schedule
    device: str


def new_eagle3(target: LlamaConfig, recipe: HeadRecipe, tokens: TokenArray) -> Eagle3:
    """A head that drafts the most frequent of the tokens."""
    drafted = most_frequent(tokens, target.vocab_size, recipe.draft_vocab_size)
    return Eagle3(target, LAYERS, recipe.mlp, drafted)


def new_dflash(target: LlamaConfig, recipe: HeadRecipe, tokens: TokenArray) -> DFlash:
    """A head that drafts every token of the target."""
    return DFlash(target, LAYERS, recipe.mlp)


Head = Eagle3 | DFlash
EXAMPLE_MLP = {"eagle3": 512, "dflash": 416}  # both heads together take less than 6 MB
KINDS: dict[str, Callable[[LlamaConfig, HeadRecipe, TokenArray], Head]] = {
    "eagle3": new_eagle3,
    "dflash": new_dflash,
}


def train_head(
    recipe: HeadRecipe,
    pair: Path,
    data: Path,
    out: Path,
    listener: Listener,
    start_from: Path | None = None,
) -> dict[str, object]:
    """Writes the head to ``out`` at every validation; returns the record.

    A run that was stopped goes on from its last validation.

    ``start_from`` is a head to go on with, whose sizes and vocabulary stay as they are.
    """
    if recipe.kind not in KINDS:
        raise PairError(f"{recipe.kind} is no kind of head; there are {', '.join(KINDS)}")
    training, validation = read_head_data(data)
    windows, held_out = (Windows(part, recipe.sequence_length) for part in (training, validation))
    recipe = replace(recipe, schedule=recipe.schedule.over(windows))
    target = FrozenTarget(pair / "target", LAYERS, recipe.device)
    torch.manual_seed(recipe.schedule.seed)
    if start_from is None:
        head = KINDS[recipe.kind](target.config, recipe, training).to(recipe.device)
        head.start_from(target)
    else:
        head = load_head(start_from, target, recipe.device)
    listener.on_stage(recipe.kind, recipe.schedule.steps)
    out.mkdir(parents=True, exist_ok=True)
    points = _train(head, target, windows, held_out, recipe, out, listener)
    (out / CHECKPOINT).unlink()
    return {
        "tokens": {"training": len(training), "validation": len(validation)},
        "recipe": asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "validation_loss": [asdict(point) for point in points],
    }


def _train(
    head: Head,
    target: FrozenTarget,
    windows: Windows,
    held_out: Windows,
    recipe: HeadRecipe,
    out: Path,
    listener: Listener,
) -> list[ValidationPoint]:
    """Trains the head and saves it whenever it has been validated."""

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(recipe.device, dtype=torch.bfloat16):
            # The last token begins the next sequence.
            return head.loss(target, tokens[:, :-1].to(recipe.device))

    return train(
        head,
        loss_of,
        windows,
        held_out,
        recipe.schedule,
        peak_learning_rate=recipe.peak_learning_rate,
        muon=recipe.muon,
        on_step=listener.on_step,
        on_validation=lambda point: save_head(head, out),
        checkpoint=out / CHECKPOINT,
    )


def save_head(head: Head, folder: Path) -> None:
    """Config and bfloat16 weights; whoever reads them sees the old ones or the new."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in head.state_dict().items()
    }
    partial = folder / "model.safetensors.partial"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)
    partial.replace(folder / "model.safetensors")
    config = json.dumps(head.config(), indent=2) + "\n"
    (folder / "config.json").write_text(config, "utf-8")


def load_head(folder: Path, target: FrozenTarget, device: str) -> Head:
    """What ``save_head`` saved, in float32."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = load_file(folder / "model.safetensors")
    head: Head
    if "dflash_config" in config:
        layers = [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]]
        head = DFlash(target.config, tuple(layers), config["intermediate_size"])
    else:
        tokens = weights["d2t"] + torch.arange(config["draft_vocab_size"])
        layers = config["eagle_aux_hidden_state_layer_ids"]
        head = Eagle3(target.config, tuple(layers), config["intermediate_size"], tokens)
    head.load_state_dict(weights)
    return head.to(device).eval()


def most_frequent(tokens: TokenArray, vocab_size: int, count: int) -> torch.Tensor:
    """The ``count`` tokens seen most often, ascending, int64; ties go to the smaller."""
    if not 1 <= count <= vocab_size:
        raise PairError(f"a draft vocabulary of {count} tokens: between 1 and {vocab_size}")
    seen = np.bincount(tokens, minlength=vocab_size)
    chosen = np.argsort(-seen, kind="stable")[:count]
    return torch.from_numpy(np.sort(chosen))
