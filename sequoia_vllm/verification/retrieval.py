"""What a request's own text says comes next: the continuation of its latest longest match.

Q prefers that token: it gets a probability of `TOLD_SHARE` at least, and the others keep their
odds. The text is known before a step draws anything. So Q is still a function of a node's path
alone, children are drawn from it as ever, and the verifiers need not know of this.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

LONGEST, SHORTEST = 8, 2
"""Tokens in a row that make a match: the longest match wins, then the latest."""
LONGEST_RUN = 32
"""Tokens in a row that are counted of the match that won."""
WINDOW = 8192
"""A request's last tokens, in which a match is looked for: memory and time are bounded."""
TOLD_SHARE = 0.7
"""Least probability in Q of a token that the text says comes next."""


def continuations(
    texts: Tensor, rows: Tensor, lengths: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """What followed the latest of the longest earlier occurrences of each text's end.

    A text that ends in a repetition goes on with it.

    Args:
        texts: int32 ``[rows, L]``: tokens; behind a text's length they mean nothing.
        rows: int64 ``[R]``: the row of each text.
        lengths: int ``[R]``: tokens of each, at least 1.
        depth: Tokens asked for.

    Returns:
        int64 ``[R, depth]``; -1 in rows whose last two tokens did not occur before. And int64
        ``[R]``: the match's tokens, at most `LONGEST_RUN`; 0 in those rows.
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
    told = inside.gather(1, (found + 1 + ahead).clamp(max=window - 1).long()).long()
    back = torch.arange(min(LONGEST_RUN, window), device=texts.device)
    ends = (inside.gather(1, (place - back).clamp(min=0).long()) for place in (last, found))
    is_same = torch.eq(*ends) & (back <= found)
    runs = is_same.cumprod(dim=1).sum(dim=1)
    return told.masked_fill(~is_match, -1), runs.masked_fill(~is_match[:, 0], 0)


def following(tokens: Tensor, told: Tensor, depth: int) -> Tensor:
    """What the texts say follows nodes of one depth: the root, or those with the token told before.

    Args:
        tokens: int64 ``[B, m]``: the nodes' tokens.
        told: int64 ``[B, D]``: each request's `continuations`, D > depth.
        depth: 0 at the root, which a match ends with.

    Returns:
        int64 ``[B, m]``; -1: nothing is said.
    """
    follows = tokens == (tokens if depth == 0 else told[:, depth - 1, None])
    return torch.where(follows, told[:, depth, None], -1)


def preferred(scores: Tensor, given: Tensor) -> Tensor:
    """Lifts a token of some rows to a share of `TOLD_SHARE` at least, which makes it the best.

    Args:
        scores: float32 ``[R, V]``, of a softmax.
        given: int64 ``[R]``: the token; outside the vocabulary: none.

    Returns:
        float32 ``[R, V]``; ``scores`` itself where no row has one.
    """
    rows = ((given >= 0) & (given < scores.shape[1])).nonzero().squeeze(1)
    if not len(rows):
        return scores
    raised, odds = scores.clone(), TOLD_SHARE / (1 - TOLD_SHARE)
    raised[rows, given[rows]] = scores[rows].logsumexp(dim=1) + math.log(odds)
    return raised
