"""From the target's answers to a folder with a trained EAGLE-3 head, as vLLM reads it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_data import PARTS, read_recipe, read_shards
from eagle3 import Eagle3, FrozenTarget
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from training import IGNORED, Recipe, Texts, token_counts, train
from transformers import AutoConfig, LlamaConfig

from sequoia_vllm.cli.common import Report
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.vocabulary.matching import Matching


def head_layers(target: LlamaConfig) -> tuple[int, ...]:
    """The layers of a target that a head sees, the embedding being 0: vLLM's own choice for deep
    targets; the first, middle and last of shallow ones."""
    count = target.num_hidden_layers
    if count >= 8:
        return 2, count // 2, count - 3
    return tuple(sorted({1, max(1, count // 2), count}))


def train_head(mlp: int, recipe: Recipe, data: Path, out: Path, report: Report) -> dict[str, Any]:
    """Trains an EAGLE-3 head from a target's answers, and writes it to ``out``.

    Args:
        mlp: Width of its MLP; 0: the target's.
        data, report: See `train_draft`.

    Returns:
        What `train` returns, with target, MLP and vocabulary.

    Raises:
        SequoiaError: The folder has no answers.
    """
    folder = Path(read_recipe(data).target)
    shards = {part: read_shards(data, part) for part in PARTS}
    config = AutoConfig.from_pretrained(folder)
    counts = token_counts(shards["training"], config.vocab_size)
    torch.manual_seed(recipe.seed)
    drafted = most_frequent(counts, recipe.tokens or len(counts))
    head = Eagle3(config, head_layers(config), mlp or config.intermediate_size, drafted)
    head.to(recipe.device)
    target = FrozenTarget(folder, head.target_layers, recipe.device, torch.bfloat16)
    head.start_from(target)
    words = head_words(head)
    texts = {part: Texts(found, words, recipe.sequence_length) for part, found in shards.items()}

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(recipe.device, dtype=torch.bfloat16):
            return head.loss(target, batch.to(recipe.device))

    record = train(head, loss_of, texts, recipe, report)
    save_head(head, out)
    return {"target": str(folder), "mlp": head.mlp_size, "vocabulary": len(drafted), **record}


def head_words(head: Eagle3) -> Matching:
    """A head reads the target's tokens, and drafts them by numbers of its own."""
    drawn = np.full(head.target.vocab_size, IGNORED)
    drawn[head.draft_tokens.cpu().numpy()] = np.arange(len(head.d2t))
    return Matching(drawn, None, np.empty((0, 2), dtype=np.int64))


def save_head(head: Eagle3, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in head.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors")
    config = json.dumps(head.config(), indent=2) + "\n"
    (folder / "config.json").write_text(config, "utf-8")


def load_head(folder: Path, target: Path, device: str) -> tuple[Eagle3, FrozenTarget]:
    """What ``save_head`` saved, in float32, and its target."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = load_file(folder / "model.safetensors")
    tokens = weights["d2t"] + torch.arange(config["draft_vocab_size"])
    layers = tuple(config["eagle_aux_hidden_state_layer_ids"])
    of_target = AutoConfig.from_pretrained(target)
    head = Eagle3(of_target, layers, config["intermediate_size"], tokens)
    head.load_state_dict(weights)
    return head.to(device).eval(), FrozenTarget(target, layers, device)


def most_frequent(counts: NDArray[np.int64], size: int) -> torch.Tensor:
    """The ``size`` tokens seen most often, ascending, int64; ties go to the smaller."""
    if not 1 <= size <= len(counts):
        raise SequoiaError(f"--tokens {size}: the target has {len(counts)}")
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))
