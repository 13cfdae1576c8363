"""How far the draft model has read each request, and what it has to read next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.engine.draft_blocks import DraftBlocks


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


class DraftReading:
    """Tokens of each request whose keys and values the draft's cache holds.

    While speculation is off (a schedule says 0 at this batch size) the draft
    reads nothing; when it is on again, requests catch up. A request that starts
    with tokens from the prefix cache reads those of them that the draft has not.

    Args:
        max_len: Longest request that the draft model can read.
        budget: Most tokens to read in one step; the rest waits for the next.
        blocks: What the draft's cache holds of the blocks that requests share.
    """

    def __init__(self, max_len: int, budget: int, blocks: DraftBlocks) -> None:
        self.max_len = max_len
        self.budget = budget
        self._blocks = blocks
        self._read: dict[str, int] = {}
        self._cached: dict[str, int] = {}  # of requests that have not begun to read

    def start(
        self, request_id: str, num_computed_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """A request (re)starts with this many tokens in the cache, by prefix caching.

        Args:
            request_id: The request.
            num_computed_tokens: Its first tokens, which the target does not compute.
            block_ids: Its blocks, for each cache group.
        """
        self.forget(request_id)
        self._cached[request_id] = num_computed_tokens
        self._blocks.start(request_id, block_ids, num_computed_tokens)

    def extend(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """The request gets more blocks, for each cache group."""
        self._blocks.extend(request_id, block_ids)

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self._read.pop(request_id, None)
        self._cached.pop(request_id, None)
        self._blocks.forget(request_id)

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
        starts, counts, taken = self._take_each(request_ids, ends)
        requests = np.flatnonzero(taken)
        if len(requests) == 0:
            return None
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

    def _take_each(
        self, request_ids: Sequence[str], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """First token to read, tokens to read, and tokens to read now, of each request.

        Requests that begin come last, in the order in which they started: the
        prefix cache gives a request blocks that an earlier one fills in this very
        step, and one pass of the draft reads both.
        """
        starts, counts, taken = np.zeros((3, len(ends)), dtype=np.int64)
        rows = {request_id: row for row, request_id in enumerate(request_ids)}
        beginning = [request_id for request_id in self._cached if request_id in rows]
        left = self.budget
        for request_id in [*(i for i in request_ids if i in self._read), *beginning]:
            row = rows[request_id]
            start = self._first_unread(request_id)
            fits = ends[row] <= self.max_len
            counts[row] = max(int(ends[row]) - start, 0) if fits else 0
            starts[row], taken[row] = start, min(int(counts[row]), left)
            if taken[row] > 0:
                left -= int(taken[row])
                self._note_read(request_id, start, start + int(taken[row]))
        return starts, counts, taken

    def _first_unread(self, request_id: str) -> int:
        if request_id in self._read:
            return self._read[request_id]
        return self._blocks.filled_tokens(request_id, self._cached[request_id])

    def _note_read(self, request_id: str, start: int, end: int) -> None:
        self._cached.pop(request_id, None)
        self._read[request_id] = end
        self._blocks.read(request_id, start, end)
