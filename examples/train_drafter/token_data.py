"""From texts to tokens: the tokenizer, the memory-mapped token file, windows and prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from errors import PairError
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training import Batches
from transformers import PreTrainedTokenizerFast

# In this order, so that their ids are 0, 1 and 2.
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
# Every byte has its own token, so that any text can be encoded.
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
# Tokens are stored as 16-bit numbers.
LARGEST_VOCABULARY = 2**16
FILES_PER_CHUNK = 64

TokenArray = NDArray[np.uint16]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that adds no special token of its own accord."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )


def write_tokens(
    path: Path, texts: Iterable[str], tokenizer: PreTrainedTokenizerFast
) -> TokenArray:
    """Writes every text as ``<s> … </s>``, and returns the file mapped into memory."""
    remaining = iter(texts)
    with path.open("wb") as file:
        while chunk := list(itertools.islice(remaining, FILES_PER_CHUNK)):
            for ids in tokenizer(chunk).input_ids:
                document = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
                np.array(document, dtype=np.uint16).tofile(file)
    return np.memmap(path, dtype=np.uint16, mode="r")


class Windows(Batches):
    """Neighbouring pieces of a token array: ``length`` tokens and the one that follows."""

    def __init__(self, tokens: TokenArray, length: int) -> None:
        self._tokens = tokens
        self._length = length
        self._count = (len(tokens) - 1) // length
        if self._count < 1:
            raise PairError(f"{len(tokens)} tokens are too few for one sequence of {length}")

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Sequence[int]) -> torch.Tensor:
        """The windows with these numbers, int64, shape ``[len(indices), length + 1]``."""
        starts = [int(index) * self._length for index in indices]
        rows = [self._tokens[start : start + self._length + 1] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def shuffled_batches(self, size: int, seed: int) -> Iterator[torch.Tensor]:
        """Batches without end, every pass over the windows in a new order."""
        order = self._endless_order(seed)
        while True:
            yield self.batch(list(itertools.islice(order, size)))

    def _endless_order(self, seed: int) -> Iterator[int]:
        rng = np.random.default_rng(seed)
        while True:
            yield from rng.permutation(len(self)).tolist()


def draw_prompts(
    tokens: TokenArray,
    tokenizer: PreTrainedTokenizerFast,
    *,
    count: int,
    length: int,
    seed: int,
) -> list[str]:
    """At most ``count`` texts of ``length`` tokens, none across a file's end.

    Raises:
        PairError: If no file has so many tokens.
    """
    if len(tokens) < length:
        raise PairError(f"{len(tokens)} validation tokens cannot hold a prompt of {length}")
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length)
    starts = np.flatnonzero((windows >= len(SPECIAL_TOKENS)).all(axis=1))
    np.random.default_rng(seed).shuffle(starts)
    texts = (tokenizer.decode(windows[start].tolist()) for start in starts)
    # A window that cuts a character in two decodes to a replacement character.
    prompts = list(itertools.islice((text for text in texts if "\ufffd" not in text), count))
    if not prompts:
        raise PairError(f"no validation file has {length} tokens in a row for a prompt")
    return prompts
