"""From the target's answers to a folder with a trained head, as vLLM reads it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from answers import IGNORED, Texts, token_counts
from dflash import DFlash
from draft_data import read_recipe, read_shards
from eagle3 import Eagle3
from errors import PairError
from frozen_target import FrozenTarget
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from training import CHECKPOINT, Listener, Schedule, train
from transformers import AutoConfig, LlamaConfig

from sequoia_vllm.vocabulary.matching import Matching


@dataclass(frozen=True)
class HeadRecipe:
    """Everything but the data that decides what a head becomes.

    Attributes:
        kind: A key of ``KINDS``.
        mlp: Size of a layer's MLP; 0 is the target's.
        tokens: Tokens that can be drafted, if the kind has a vocabulary of its own; 0: all.
        sequence_length: Tokens of a text that are read; the rest is left out.
        schedule: ``steps`` 0 is one pass over the texts.
    """

    kind: str
    mlp: int
    tokens: int
    sequence_length: int
    peak_learning_rate: float
    muon: bool
    schedule: Schedule
    device: str


def new_eagle3(target: LlamaConfig, recipe: HeadRecipe, counts: NDArray[np.int64]) -> Eagle3:
    """A head that drafts the most frequent of the tokens."""
    drafted = most_frequent(counts, recipe.tokens or len(counts))
    return Eagle3(target, head_layers(target), recipe.mlp, drafted)


def new_dflash(target: LlamaConfig, recipe: HeadRecipe, counts: NDArray[np.int64]) -> DFlash:
    """A head that drafts every token; a mask is the last token that is in no text."""
    unseen = np.flatnonzero(counts == 0)
    if not len(unseen):
        raise PairError("the texts have all of the target's tokens: DFlash needs one as a mask")
    return DFlash(target, head_layers(target), recipe.mlp, int(unseen[-1]))


Head = Eagle3 | DFlash
KINDS: dict[str, Callable[[LlamaConfig, HeadRecipe, NDArray[np.int64]], Head]] = {
    "eagle3": new_eagle3,
    "dflash": new_dflash,
}


def head_layers(target: LlamaConfig) -> tuple[int, ...]:
    """The layers of a target that a head sees, the embedding being 0.

    Deep targets have those of vLLM's own choice. Shallow ones have the first, middle and last.
    """
    count = target.num_hidden_layers
    if count >= 8:
        return 2, count // 2, count - 3
    return tuple(sorted({1, max(1, count // 2), count}))


def train_head(recipe: HeadRecipe, data: Path, out: Path, listener: Listener) -> dict[str, Any]:
    """Writes the head to ``out`` at every validation; returns the record.

    A run that was stopped goes on from its last validation.
    """
    if recipe.kind not in KINDS:
        raise PairError(f"{recipe.kind} is no kind of head; there are {', '.join(KINDS)}")
    folder = Path(read_recipe(data).target)
    shards = {part: read_shards(data, part) for part in ("training", "validation")}
    config = AutoConfig.from_pretrained(folder)
    recipe = replace(recipe, mlp=recipe.mlp or config.intermediate_size)
    counts = token_counts(shards["training"], config.vocab_size)
    torch.manual_seed(recipe.schedule.seed)
    head = KINDS[recipe.kind](config, recipe, counts).to(recipe.device)
    target = FrozenTarget(folder, head.target_layers, recipe.device, torch.bfloat16)
    head.start_from(target)
    words = head_words(head)
    texts = {part: Texts(found, words, recipe.sequence_length) for part, found in shards.items()}
    recipe = replace(recipe, schedule=recipe.schedule.over(texts["training"]))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(recipe.device, dtype=torch.bfloat16):
            return head.loss(target, batch.to(recipe.device))

    out.mkdir(parents=True, exist_ok=True)
    listener.on_stage(recipe.kind, recipe.schedule.steps)
    points = train(
        head, loss_of, texts["training"], texts["validation"], recipe.schedule,
        peak_learning_rate=recipe.peak_learning_rate, muon=recipe.muon, on_step=listener.on_step,
        on_validation=lambda point: save_head(head, out), checkpoint=out / CHECKPOINT,
    )  # fmt: skip
    return {
        "target": str(folder),
        "recipe": asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "vocabulary": int((words.drawn != IGNORED).sum()),
        "texts": {part: len(found) for part, found in texts.items()},
        "hours": points[-1].hours,
        "validation_loss": [asdict(point) for point in points],
    }


def head_words(head: Head) -> Matching:
    """A head reads the target's tokens, and drafts them by numbers of its own."""
    size = head.target.vocab_size
    drawn = np.arange(size)
    if isinstance(head, Eagle3):
        drawn = np.full(size, IGNORED)
        drawn[head.draft_tokens.cpu().numpy()] = np.arange(len(head.d2t))
    return Matching(drawn, None, np.empty((0, 2), dtype=np.int64))


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


def is_head(folder: Path) -> bool:
    """Whether a folder has a head, and no model of its own."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return "dflash_config" in config or "draft_vocab_size" in config


def load_head(folder: Path, target: Path, device: str) -> tuple[Head, FrozenTarget]:
    """What ``save_head`` saved, in float32, and its target."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = load_file(folder / "model.safetensors")
    of_target = AutoConfig.from_pretrained(target)
    head: Head
    if dflash := config.get("dflash_config"):
        layers = [layer + 1 for layer in dflash["target_layer_ids"]]
        mlp, mask = config["intermediate_size"], dflash["mask_token_id"]
        head = DFlash(of_target, tuple(layers), mlp, mask)
    else:
        tokens = weights["d2t"] + torch.arange(config["draft_vocab_size"])
        layers = config["eagle_aux_hidden_state_layer_ids"]
        head = Eagle3(of_target, tuple(layers), config["intermediate_size"], tokens)
    head.load_state_dict(weights)
    return head.to(device).eval(), FrozenTarget(target, head.target_layers, device)


def most_frequent(counts: NDArray[np.int64], size: int) -> torch.Tensor:
    """The ``size`` tokens seen most often, ascending, int64; ties go to the smaller."""
    if not 1 <= size <= len(counts):
        raise PairError(f"--tokens {size}: the target has {len(counts)}")
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))
