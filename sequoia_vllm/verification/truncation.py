"""A request's min-p, top-k and top-p on the draft's side: Q leans into the nucleus.

Where a request cuts the target's distribution P off, a drafted token outside of P is
rejected for certain. So the same parameters are applied to Q before children are drawn.
They lower tokens, and do not exclude them: the draft's nucleus is not the target's, and
often holds fewer tokens than a node has children. The others would be drawn uniformly
from the vocabulary, which often costs more than is gained (docs/benchmarks.md).

Any Q is lossless, as long as children are drawn from it *and* verified against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOWERED_BY = 4.0
"""Scaled logits outside the nucleus are lowered by this: to 1/55 of their weight.

With 2 a tenth of what the first child gains is lost. With 8 it gains no more, and children
after it a little less, who find tokens that only the target's nucleus holds.
"""
LARGEST_NUCLEUS = 256
"""Tokens of the nucleus at most; a larger one is not looked for, and nothing lowered."""


@dataclass(frozen=True)
class Truncation:
    """Sampling parameters of R rows that exclude tokens; None where no row has any.

    Attributes:
        top_k: int ``[R]``, V in rows without.
        top_p: float32 ``[R]``, 1 likewise.
        min_p: float32 ``[R]``, 0 likewise.
    """

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    def __bool__(self) -> bool:
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    def of(self, rows: Tensor) -> Truncation:
        """That of these rows, int64 ``[A]``, which may repeat."""
        return Truncation(
            None if self.top_k is None else self.top_k[rows],
            None if self.top_p is None else self.top_p[rows],
            None if self.min_p is None else self.min_p[rows],
        )


NOTHING_CUT = Truncation()
"""No row has any of the parameters."""


def lower_outside(scaled: Tensor, truncation: Truncation) -> Tensor:
    """Lowers what the parameters exclude, applied in vLLM's order: min-p, top-k, top-p.

    The best token stays, and of equal ones all or none.

    Args:
        scaled: float32 ``[R, V]``: logits over temperature.
        truncation: Of the R rows.

    Returns:
        float32 ``[R, V]``; ``scaled`` itself without any parameters.
    """
    if not truncation:
        return scaled
    outside = scaled < _lowest_inside(scaled, truncation)
    return torch.where(outside, scaled - LOWERED_BY, scaled)


def _lowest_inside(scaled: Tensor, truncation: Truncation) -> Tensor:
    """float32 ``[R, 1]``: the nucleus's lowest; -inf where it has more tokens than we look for."""
    vocabulary = scaled.shape[1]
    # One more, which tells whether the nucleus ends before it. Sorting all takes ten times as long.
    best = scaled.topk(min(LARGEST_NUCLEUS + 1, vocabulary), dim=1).values
    maximum = best[:, :1]
    weights = (best - maximum).exp()
    inside = torch.ones_like(best, dtype=torch.bool)
    if truncation.min_p is not None:
        inside &= weights >= truncation.min_p[:, None]
    if truncation.top_k is not None:
        rank = torch.arange(best.shape[1], device=scaled.device)
        inside &= rank < truncation.top_k[:, None]
    if truncation.top_p is not None:
        all_weights = (scaled - maximum).exp_().sum(dim=1, keepdim=True)
        cut = (weights * inside).sum(dim=1, keepdim=True)
        total = torch.where(inside[:, -1:], all_weights, cut)
        before = weights.cumsum(dim=1) - weights
        inside &= before < truncation.top_p[:, None] * total
    inside[:, 0] = True
    lowest = best.gather(1, inside.sum(dim=1, keepdim=True) - 1)
    return lowest.masked_fill_(inside[:, -1:], float("-inf"))
