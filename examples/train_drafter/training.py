"""The target's answers as what drafters learn from, and the loop that trains a drafter."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from draft_data import Shard
from numpy.typing import NDArray
from torch import nn
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from sequoia_vllm.cli.common import Report
from sequoia_vllm.vocabulary.matching import Matching

FINAL_RATE = 0.05  # of the highest learning rate
WEIGHT_DECAY = 0.1  # of matrices, the embedding included
BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
VALIDATION_TEXTS = 128
IGNORED = -1
BATCHES_TOGETHER = 8  # share their texts out by length
_SMALLEST_REST = 1e-4  # keeps the logarithm of what is left to other tokens finite


class Texts:
    """Answers in a drafter's tokens, padded, with the target's distribution of each token.

    A batch is ``[texts, length, 1 + 2 × 16]`` in float32: the token that the drafter reads, the
    drafter's numbers of the target's likeliest next tokens (-1: none, or it cannot draft it), and
    their probabilities. Positions whose next token is no answer's have no likely token at all.
    """

    def __init__(self, shards: Sequence[Shard], words: Matching, length: int) -> None:
        self._rows = [row for shard in shards for row in _rows(shard, words, length)]

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: Sequence[int]) -> torch.Tensor:
        rows = [self._rows[index] for index in indices]
        out = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[1]), dtype=np.float32)
        count = (out.shape[2] - 1) // 2
        out[..., 1 : 1 + count] = IGNORED
        for place, row in enumerate(rows):
            out[place, : len(row)] = row
        return torch.from_numpy(out)

    def shuffled_batches(self, size: int, seed: int) -> Iterator[torch.Tensor]:
        """Batches without end, every pass in a new order. Eight that follow each other share their
        texts out by length: with answers of up to 192 tokens a quarter less is padding."""
        rng = np.random.default_rng(seed)
        order: list[int] = []
        together = max(1, min(BATCHES_TOGETHER, len(self) // size))
        while True:
            while len(order) < together * size:
                order += rng.permutation(len(self)).tolist()
            chosen = sorted(order[: together * size], key=lambda index: len(self._rows[index]))
            del order[: together * size]
            for place in rng.permutation(together).tolist():
                yield self.batch(chosen[place * size : (place + 1) * size])


def _rows(shard: Shard, words: Matching, length: int) -> Iterator[NDArray[np.float32]]:
    """The texts of a shard, as `Texts` has them."""
    begin = answered = 0
    count = shard.likely.shape[1]
    for end, prompt in zip(shard.ends.tolist(), shard.prompt_lengths.tolist(), strict=True):
        tokens, total = shard.tokens[begin:end], end - begin - prompt
        likely = words.drawn[shard.likely[answered : answered + total]]
        shares = np.exp(shard.log_probabilities[answered : answered + total].astype(np.float32))
        row = np.zeros((len(tokens), 1 + 2 * count), dtype=np.float32)
        row[:, 0] = tokens if words.read is None else words.read[tokens]
        row[:, 1 : 1 + count] = IGNORED
        row[prompt - 1 : -1, 1 : 1 + count] = likely
        row[prompt - 1 : -1, 1 + count :] = shares
        yield row[:length]
        begin, answered = end, answered + total


def split(texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch's tokens ``[texts, length]``, likely tokens and their probabilities."""
    count = (texts.shape[2] - 1) // 2
    return texts[..., 0].long(), texts[..., 1 : 1 + count].long(), texts[..., 1 + count :]


def cross_entropies(
    logits: torch.Tensor, likely: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy with the target's distribution, of which the likeliest tokens are known.

    Args:
        logits: The drafter's, ``[N, vocabulary]``.
        likely: The target's likeliest tokens, by the drafter's numbers, ``[N, 16]``. `IGNORED` is a
            token that the drafter does not have: it counts nothing.
        shares: Their probabilities, ``[N, 16]``. All other tokens have the rest in common.

    Returns:
        Nats, ``[N]``.
    """
    logits = logits.float()
    of_likely = logits.gather(1, likely.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    known = likely != IGNORED
    loss = -torch.where(known, shares * of_likely, 0.0).sum(-1)
    rest = (1 - shares.sum(-1)).clamp(min=0)
    left = (1 - torch.where(known, of_likely.exp(), 0.0).sum(-1)).clamp(min=_SMALLEST_REST)
    return loss - rest * left.log()


def token_counts(shards: Sequence[Shard], rows: int) -> NDArray[np.int64]:
    """How often each of the target's tokens is in the texts, ``[rows]``: of its logits' rows."""
    return np.asarray(sum(np.bincount(shard.tokens, minlength=rows) for shard in shards))


@dataclass(frozen=True)
class Recipe:
    """Everything but the data and a drafter's sizes that decides what it becomes."""

    tokens: int  # that can be drafted, the target's most frequent; 0: all of the target's
    sequence_length: int  # tokens of a text that are read; the rest is left out
    learning_rate: float  # the highest
    steps: int  # of the optimizer; 0 is one pass over the texts
    warmup: int  # steps of linear warm-up; at most a tenth of the steps are used
    batch_size: int
    validate_every: int
    seed: int  # decides weights and order
    device: str


def train(
    model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], texts: dict[str, Texts],
    recipe: Recipe, report: Report,
) -> dict[str, Any]:  # fmt: skip
    """Trains the model in place.

    Args:
        loss_of: The model's mean loss over a batch of `Texts`, nats per token.
        texts: By part: "training" and "validation", which is held out.
        report: Called after each step with its loss, in words, its number, and their number.

    Returns:
        The recipe with its number of steps, parameters, texts, hours, and validation losses.
    """
    steps = recipe.steps or max(1, len(texts["training"]) // recipe.batch_size)
    norms = [one for one in model.parameters() if one.ndim < 2]
    matrices = [one for one in model.parameters() if one.ndim >= 2]
    groups = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    rate = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, min(recipe.warmup, steps // 10), steps, min_lr_rate=FINAL_RATE
    )
    batches = texts["training"].shuffled_batches(recipe.batch_size, recipe.seed)
    began, losses = time.monotonic(), []
    model.train()
    for step in range(1, steps + 1):
        loss = loss_of(next(batches))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        rate.step()
        report(f"loss {loss.item():.3f}", step, steps)
        if step % recipe.validate_every == 0 or step == steps:
            model.eval()
            found = _validation_loss(loss_of, texts["validation"], recipe.batch_size)
            model.train()
            losses.append({"step": step, "loss": found})
    return {
        "recipe": asdict(replace(recipe, steps=steps)),
        "parameters": sum(one.numel() for one in model.parameters()),
        "texts": {part: len(found) for part, found in texts.items()},
        "hours": round((time.monotonic() - began) / 3600, 6),
        "validation_loss": losses,
    }


@torch.no_grad()
def _validation_loss(
    loss_of: Callable[[torch.Tensor], torch.Tensor], texts: Texts, batch_size: int
) -> float:
    """Mean over at most 128 texts, spread over all of them."""
    count = min(VALIDATION_TEXTS, len(texts))
    chosen = np.linspace(0, len(texts) - 1, count).astype(int).tolist()
    total = 0.0
    for first in range(0, count, batch_size):
        batch = texts.batch(chosen[first : first + batch_size])
        total += loss_of(batch).item() * len(batch)
    return total / count
