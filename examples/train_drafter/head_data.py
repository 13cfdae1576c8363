"""What heads learn from: text that people wrote, and as much that the target wrote itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import Corpus, read_texts
from errors import PairError
from frozen_target import FrozenTarget
from numpy.typing import NDArray
from pair import Listener
from quality import read_prompts
from token_data import TokenArray, write_tokens
from transformers import AutoTokenizer

TEMPERATURES = (0.0, 0.6, 1.0)  # of the target's own texts, in turn
BEGINNING = 0.25  # of the target's texts is taken from people's
TEXTS_AT_ONCE = 256
PARTS = ("training", "validation")


@dataclass(frozen=True)
class DataRecipe:
    """What decides the data, but for the corpus and the target.

    Attributes:
        sequences: Training sequences by people, and as many by the target. A
            sixteenth of them is added for validation.
        length: Tokens in a sequence.
        seed: Decides what the target writes.
        device: Where it writes.
    """

    sequences: int
    length: int
    seed: int
    device: str

    def count(self, part: str) -> int:
        """The sequences by people of a part."""
        return self.sequences if part == "training" else max(1, self.sequences // 16)


def write_head_data(
    corpus: Corpus, recipe: DataRecipe, pair: Path, out: Path, listener: Listener
) -> dict[str, int]:
    """Writes ``out/training.bin`` and ``out/validation.bin``; returns their numbers of tokens.

    Sequences by people and by the target take turns. No text is used that has
    one of the pair's prompts.
    """
    out.mkdir(parents=True, exist_ok=True)
    target = FrozenTarget(pair / "target", (), recipe.device, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    prompts = read_prompts(pair / "prompts.jsonl")
    sizes = {}
    for part, files in zip(PARTS, (corpus.training, corpus.validation), strict=True):
        listener.on_stage(f"{part} text", None)
        texts = without_prompts(read_texts(files), prompts)
        people = write_tokens(out / f"{part}.people", texts, tokenizer)
        rows = sequences_of(people, recipe.count(part), recipe.length)
        (out / f"{part}.people").unlink()
        listener.on_stage(f"{part} target", -(-len(rows) // TEXTS_AT_ONCE))
        written = write_on(target, rows, recipe, listener)
        alternating = np.stack((rows, written), 1).reshape(-1)
        alternating.astype(np.uint16).tofile(out / f"{part}.bin")
        sizes[part] = len(alternating)
    return sizes


def read_head_data(folder: Path) -> tuple[TokenArray, TokenArray]:
    """The training and the validation tokens, mapped into memory."""
    paths = [folder / f"{part}.bin" for part in PARTS]
    for path in paths:
        if not path.is_file():
            raise PairError(f"{path} is missing; write the data first, with head-data")
    training, validation = (np.memmap(path, dtype=np.uint16, mode="r") for path in paths)
    return training, validation


def write_on(
    target: FrozenTarget, rows: NDArray[np.int64], recipe: DataRecipe, listener: Listener
) -> NDArray[np.int64]:
    """The target's texts from the rows' beginnings, shape as the rows'."""
    torch.manual_seed(recipe.seed)
    kept = max(1, int(recipe.length * BEGINNING))
    written = []
    for first in range(0, len(rows), TEXTS_AT_ONCE):
        beginnings = torch.from_numpy(rows[first : first + TEXTS_AT_ONCE, :kept]).to(recipe.device)
        repeats = -(-len(beginnings) // len(TEMPERATURES))
        temperatures = torch.tensor(TEMPERATURES * repeats)[: len(beginnings)]
        texts = target.write(beginnings, recipe.length - kept, temperatures.to(recipe.device))
        written.append(texts.cpu().numpy())
        listener.on_step(None)
    return np.concatenate(written)


def sequences_of(tokens: TokenArray, count: int, length: int) -> NDArray[np.int64]:
    """At most ``count`` sequences in random order, int64, ``[count, length]``."""
    whole = len(tokens) // length
    if whole < 1:
        raise PairError(f"{len(tokens)} tokens are too few for one sequence of {length}")
    chosen = np.random.default_rng(0).permutation(whole)[:count]
    return tokens[: whole * length].reshape(whole, length)[chosen].astype(np.int64)


def without_prompts(texts: Iterator[str], prompts: Sequence[str]) -> Iterator[str]:
    """The texts that none of the prompts was taken from."""
    known = [(_inner_line(prompt), prompt) for prompt in prompts]
    for text in texts:
        # To look for lines is quick, and leaves few prompts to look for.
        lines = {"", *text.split("\n")}
        if not any(line in lines and prompt in text for line, prompt in known):
            yield text


def _inner_line(prompt: str) -> str:
    """The longest line that the prompt has whole; empty if it has none."""
    return max(prompt.split("\n")[1:-1], key=len, default="")
