"""The target's answers as what drafters learn from: tokens, and the law of each next one."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from draft_data import Shard
from numpy.typing import NDArray

from sequoia_vllm.vocabulary.matching import Matching

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
        """The texts with these numbers."""
        rows = [self._rows[index] for index in indices]
        out = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[1]), dtype=np.float32)
        count = (out.shape[2] - 1) // 2
        out[..., 1 : 1 + count] = IGNORED
        for place, row in enumerate(rows):
            out[place, : len(row)] = row
        return torch.from_numpy(out)

    def shuffled_batches(self, size: int, seed: int) -> Iterator[torch.Tensor]:
        """Batches without end, every pass over the texts in a new order. Eight that follow each
        other share their texts out by length: with answers of at most 192 tokens a quarter less is
        padding."""
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
    """Cross-entropy with the target's distribution, nats, ``[N]``.

    The target's likeliest tokens are known with their probabilities, all others together as
    the rest. A likely token that the drafter does not have counts nothing.

    Args:
        logits: The drafter's, ``[N, vocabulary]``.
        likely: The drafter's numbers of the target's likeliest tokens, ``[N, 16]``.
    """
    logits = logits.float()
    of_likely = logits.gather(1, likely.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    known = likely != IGNORED
    loss = -torch.where(known, shares * of_likely, 0.0).sum(-1)
    rest = (1 - shares.sum(-1)).clamp(min=0)
    left = (1 - torch.where(known, of_likely.exp(), 0.0).sum(-1)).clamp(min=_SMALLEST_REST)
    return loss - rest * left.log()


def token_counts(shards: Sequence[Shard], rows: int) -> NDArray[np.int64]:
    """How often each of the target's tokens is in the texts, ``[rows]``."""
    return np.asarray(sum(np.bincount(shard.tokens, minlength=rows) for shard in shards))
