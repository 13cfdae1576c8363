"""How far the draft model has read each request, and what it has to read next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class CommittedTokens:
    """Committed tokens that the draft model has not seen yet.

    All on the host.

    Attributes:
        requests: int64 ``[R]``: rows of the batch these belong to.
        tokens: int64 ``[T]``: all their tokens, request after request.
        positions: int64 ``[T]``.
        counts: int64 ``[R]``: tokens of each request, at least 1.
        complete: bool ``[R]``: these are all that the request has.
    """

    requests: NDArray[np.int64]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    counts: NDArray[np.int64]
    complete: NDArray[np.bool_]

    @cached_property
    def last(self) -> NDArray[np.int64]:
        """int64 ``[R]``: index of each request's last token."""
        return self.counts.cumsum() - 1


class DraftProgress:
    """Tokens of each request whose keys and values the draft's cache holds.

    While speculation is off (a schedule says 0 at this batch size) the draft
    reads nothing; when it is on again, requests catch up.

    Args:
        max_len: Longest request that the draft model can read.
        budget: Most tokens to read in one step; the rest waits for the next.
    """

    def __init__(self, max_len: int, budget: int) -> None:
        self.max_len = max_len
        self.budget = budget
        self._read: dict[str, int] = {}

    def start(self, request_id: str, num_computed_tokens: int) -> None:
        """A request (re)starts with this many tokens in the cache, by prefix caching."""
        self._read[request_id] = num_computed_tokens

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self._read.pop(request_id, None)

    def take(
        self,
        request_ids: Sequence[str],
        token_ids: np.ndarray,
        known: np.ndarray,
        sampled: np.ndarray,
        num_sampled: np.ndarray,
    ) -> CommittedTokens | None:
        """The tokens to read now, which then count as read.

        Args:
            request_ids: The batch.
            token_ids: int ``[requests, max_len]``: tokens of each request...
            known: int ``[requests]``: ...of which this many are in the target's cache.
            sampled: int ``[requests, W]``: tokens emitted by this step...
            num_sampled: int ``[requests]``: ...this many of them.

        Returns:
            None if there is nothing to read.
        """
        ends = known + num_sampled
        starts = np.array([self._read.get(request_id, 0) for request_id in request_ids])
        counts = np.where(ends <= self.max_len, np.maximum(ends - starts, 0), 0)
        allowed = np.maximum(self.budget - (counts.cumsum() - counts), 0)
        taken = np.minimum(counts, allowed)
        requests = np.flatnonzero(taken)
        if len(requests) == 0:
            return None
        for request in requests:
            self._read[request_ids[request]] = int(starts[request] + taken[request])
        row = np.repeat(requests, taken[requests])
        first = np.repeat(taken[requests].cumsum() - taken[requests], taken[requests])
        positions = starts[row] + np.arange(len(row)) - first
        column = positions - known[row]
        tokens = np.where(
            column < 0,
            token_ids[row, np.minimum(positions, token_ids.shape[1] - 1)],
            sampled[row, np.clip(column, 0, sampled.shape[1] - 1)],
        )

        return CommittedTokens(
            requests=requests,
            tokens=tokens.astype(np.int64),
            positions=positions,
            counts=taken[requests],
            complete=taken[requests] == counts[requests],
        )
