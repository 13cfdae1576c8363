"""Which tokens followed before: of any request by the target's logits, and in the same text."""

import logging

import torch
from torch import Tensor
from torch.nn.functional import pad

logger = logging.getLogger("vllm.sequoia")

SUCCESSORS = 8
"""Tokens kept of each token's successors."""
MOST_LEARNED = 256
"""Rows of logits that a step learns from; of more rows it takes every second, third, ..."""
LONGEST, SHORTEST = 8, 2
"""Tokens in a row that make a match: the longest match wins, then the latest."""
WINDOW = 8192
"""A request's last tokens, in which a match is looked for: memory and time are bounded."""

# Logits of the matched token, of the successors by rank, and of all other tokens. They are exact in
# bfloat16: Q must be what children are drawn from.
MATCHED, OTHERS = 1.5, -30.0
BY_RANK = (0.0, -1.25, -1.75, -2.0, -2.25, -2.5, -3.0, -3.0)


class Successors:
    """The target's latest likeliest successors of each token, and the logits that they give.

    Attributes:
        table: int32 ``[V + 1, k]``: likeliest first; -1: nothing is known. The last row takes what
            is not kept.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._vocab_size = vocab_size
        kept = min(SUCCESSORS, vocab_size)
        self.table = torch.full((vocab_size + 1, kept), -1, dtype=torch.int32, device=device)
        mib = self.table.nbytes / (1 << 20)
        logger.info("Sequoia: the table of what follows each token takes %.1f MiB", mib)
        self._values = torch.tensor((MATCHED, *BY_RANK[:kept]), dtype=dtype, device=device)

    def learn(self, tokens: Tensor, logits: Tensor) -> None:
        """Notes what the target expects after tokens; of rows of one token the last is kept.

        All ranks of an engine keep the same: they draft the same trees.

        Args:
            logits: ``[R, V]``: the target's, after each of them.
        """
        step = len(tokens) // (MOST_LEARNED + 1) + 1
        tokens, logits = tokens[::step].long(), logits[::step]
        comes_again = (tokens == tokens[:, None]).triu(1).any(dim=1)
        rows = tokens.masked_fill(comes_again, self._vocab_size).clamp(max=self._vocab_size)
        self.table[rows] = logits.topk(self.table.shape[1], dim=1).indices.int()

    def logits(self, tokens: Tensor, told: Tensor, depth: int) -> Tensor:
        """Logits at nodes of one depth; those whose token the match told go on with it.

        Args:
            tokens: int64 ``[B, m]``: the nodes' tokens.
            told: int64 ``[B, D]``: each request's `continuations`, D > depth.
            depth: 0 at the root, which a match ends with.

        Returns:
            ``[B * m, V]``.
        """
        nowhere = self._vocab_size
        follows = tokens == (tokens if depth == 0 else told[:, depth - 1, None])
        matched = torch.where(follows, told[:, depth, None], -1).flatten()[:, None]
        successors = self.table[tokens.flatten()].long()
        successors = successors.masked_fill(successors == matched, nowhere)
        places = torch.cat([matched, successors], dim=1)
        places = places.masked_fill(places < 0, nowhere)
        found = self._values.new_full((len(places), nowhere + 1), OTHERS)
        return found.scatter_(1, places, self._values.expand(places.shape))[:, :nowhere]


def continuations(texts: Tensor, rows: Tensor, lengths: Tensor, depth: int) -> Tensor:
    """What followed the latest of the longest earlier occurrences of each text's end.

    A text that ends in a repetition goes on with it.

    Args:
        texts: int32 ``[rows, L]``: tokens; behind a text's length they mean nothing.
        rows: int64 ``[R]``: the row of each text.
        lengths: int ``[R]``: tokens of each, at least 1.

    Returns:
        int64 ``[R, depth]``; -1 in rows whose last two tokens did not occur before.
    """
    longest = texts.shape[1]
    window = min(longest, WINDOW)
    first = (lengths - window).clamp(min=0)[:, None]
    place = torch.arange(window, device=texts.device)
    inside = texts[rows[:, None], (first + place).clamp(max=longest - 1)]
    last = lengths[:, None] - first - 1
    end = inside.gather(1, (last - place[:LONGEST]).clamp(min=0).long())
    is_same = place < last
    run = torch.zeros_like(inside)
    for back in range(min(LONGEST, window)):
        same = inside[:, : window - back] == end[:, back, None]
        is_same = is_same & pad(same, (back, 0))
        run += is_same
    best = (run * window + place).max(dim=1, keepdim=True).values
    found, is_match = best % window, best >= SHORTEST * window
    ahead = torch.arange(depth, device=texts.device) % (last - found).clamp(min=1)
    following = inside.gather(1, (found + 1 + ahead).clamp(max=window - 1).long()).long()
    return following.masked_fill(~is_match, -1)
