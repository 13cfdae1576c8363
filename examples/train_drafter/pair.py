"""From a corpus to a folder with a trained pair, its tokenizer and its prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from corpus import Corpus, read_texts
from quality import write_prompts
from shapes import Shape, new_model
from token_data import TokenArray, Windows, draw_prompts, train_tokenizer, write_tokens
from training import Schedule, next_token_loss, train
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TOKENIZER_FILE_STRIDE = 6  # the tokenizer learns from every sixth training file
PROMPT_COUNT, PROMPT_LENGTH = 200, 128


@dataclass(frozen=True)
class Recipe:
    """Everything but the corpus that decides what a pair becomes.

    Attributes:
        shapes: ``target`` and ``draft``.
        vocab_size: Tokens to learn; a small corpus may yield fewer.
        sequence_length: Tokens predicted in a sequence.
        schedule: For both models. ``steps`` 0 is one pass over the training tokens.
        device: Where to train.
    """

    shapes: dict[str, Shape]
    vocab_size: int
    sequence_length: int
    schedule: Schedule
    device: str


@dataclass(frozen=True)
class Listener:
    """Told what is going on: a new stage and its steps (None: unknown), and each step's loss.

    Steps that learn nothing have no loss.
    """

    on_stage: Callable[[str, int | None], None]
    on_step: Callable[[float | None], None]


def train_pair(corpus: Corpus, recipe: Recipe, out: Path, listener: Listener) -> dict[str, object]:
    """Writes ``out/target``, ``out/draft`` and ``out/prompts.jsonl``; returns the record.

    The prompts are from the first half of the validation tokens, the
    validation loss is on the second.
    """
    out.mkdir(parents=True, exist_ok=True)
    listener.on_stage("tokenizer", None)
    tokenizer = train_tokenizer(
        read_texts(corpus.training[::TOKENIZER_FILE_STRIDE]), recipe.vocab_size
    )
    with TemporaryDirectory(dir=out, prefix="tokens-") as folder:
        listener.on_stage("tokens", None)
        training, validation = (
            write_tokens(Path(folder) / f"{name}.bin", read_texts(files), tokenizer)
            for name, files in (("training", corpus.training), ("validation", corpus.validation))
        )
        half = len(validation) // 2
        _save_prompts(out, validation[:half], tokenizer, recipe.schedule.seed)
        windows = Windows(training, recipe.sequence_length)
        held_out = Windows(validation[half:], recipe.sequence_length)
        recipe = replace(recipe, schedule=recipe.schedule.over(windows))
        losses = {
            name: _train_one(name, windows, held_out, recipe, tokenizer, out, listener)
            for name in recipe.shapes
        }
    return {
        "files": {"training": len(corpus.training), "validation": len(corpus.validation)},
        "tokens": {"training": len(training), "validation": len(validation)},
        "recipe": asdict(recipe),
        "validation_loss": losses,
    }


def _save_prompts(
    out: Path, tokens: TokenArray, tokenizer: PreTrainedTokenizerFast, seed: int
) -> None:
    prompts = draw_prompts(tokens, tokenizer, count=PROMPT_COUNT, length=PROMPT_LENGTH, seed=seed)
    write_prompts(out / "prompts.jsonl", prompts)


def _train_one(
    name: str,
    windows: Windows,
    held_out: Windows,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    listener: Listener,
) -> list[dict[str, float]]:
    """Trains and saves one of the two; returns its validation losses."""
    shape, schedule = recipe.shapes[name], recipe.schedule
    model = new_model(shape, len(tokenizer), schedule.seed).to(recipe.device)
    listener.on_stage(name, schedule.steps)
    points = train(
        model,
        partial(next_token_loss, model),
        windows,
        held_out,
        schedule,
        peak_learning_rate=shape.peak_learning_rate,
        on_step=listener.on_step,
    )
    _save(model, tokenizer, out / name)
    return [asdict(point) for point in points]


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Config, generation config, bfloat16 weights and tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
