"""Operations on a batch of distributions that verification is made of, each ``[A, V]``."""

from __future__ import annotations

import torch
from torch import Tensor


def without_token(draft: Tensor, token: Tensor, rejected: Tensor) -> Tensor:
    """D without a token: D[x] = 0, D = norm(D); in place.

    Args:
        draft: D, ``[A, V]``; overwritten.
        token: int64 ``[A]``: the child that was rejected last.
        rejected: int64 ``[A, rank + 1]``: all children so far, this one included. Where D
            has nothing left, it becomes uniform over the other tokens.
    """
    draft.scatter_(1, token[:, None], 0.0)
    mass = draft.sum(dim=1, keepdim=True)
    exhausted = mass == 0
    uniform = exhausted.to(draft.dtype) / max(draft.shape[1] - rejected.shape[1], 1)
    # One pass for both cases: D / mass + 0, or 0 / 1 + uniform.
    torch.addcdiv(uniform, draft, mass + exhausted, out=draft)
    return draft.scatter_(1, rejected, 0.0)


def sample_rows(distribution: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of ``[A, V]`` by inversion, with ``uniform`` ``[A]`` in [0, 1)."""
    # float64: in float32 the sums of a large vocabulary lose its rare tokens.
    cumulative = distribution.cumsum(dim=1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    return index.clamp_(max=distribution.shape[1] - 1)


def probability_of(distribution: Tensor, token: Tensor) -> Tensor:
    """``[A]``: the probability of one token per row."""
    return distribution.gather(1, token[:, None]).squeeze(1)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """``values[rows]`` for increasing rows; no copy where that is all of them."""
    return values if rows.numel() == values.shape[0] else values.index_select(0, rows)


def true_indices(mask: Tensor) -> Tensor:
    """Where a mask ``[A]`` holds; waits for the device."""
    return mask.nonzero().squeeze(1)
