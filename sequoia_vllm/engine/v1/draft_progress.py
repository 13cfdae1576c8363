"""How far the draft model has read each request, and what it has to read next.

The draft *reads* a token when it computes the token's keys and values into its own KV cache. It
must have read all of a request's committed tokens before it can draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.engine.runner.draft_blocks import BlockIds, DraftBlocks


@dataclass(frozen=True)
class CommittedTokens:
    """The committed tokens that the draft model reads in one step, as arrays on the host."""

    requests: NDArray[np.int64]  # int64 ``[R]``: batch indices of the requests that have any
    tokens: NDArray[np.int64]  # int64 ``[T]``: the tokens, request after request
    positions: NDArray[np.int64]  # int64 ``[T]``: the position of each token in its request
    counts: NDArray[np.int64]  # int64 ``[R]``: tokens of each request, at least 1
    complete: NDArray[np.bool_]  # bool ``[R]``: whether these are the request's last unread tokens

    @cached_property
    def last(self) -> NDArray[np.int64]:
        """int64 ``[R]``: the index in ``tokens`` of each request's last one."""
        return self.counts.cumsum() - 1


class DraftProgressV1:
    """Follows how many tokens of each request the draft model has read.

    Before the target's forward, the runner calls `forget`, `start` and `extend`. After sampling, if
    drafts are due, it calls `take` once, and `TreeProposerV1.advance` reads these tokens.

    While the schedule asks for no drafts, the draft reads nothing; later the requests catch up. It
    never reads requests that can use no tree. If another shares their blocks, it reads these then.
    It skips tokens from the prefix cache that it has read for another request.

    Args:
        budget: The most tokens to read in one step; the rest waits for the next.
    """

    def __init__(self, budget: int, blocks: DraftBlocks) -> None:
        self.budget = budget
        self._blocks = blocks
        self._read: dict[str, int] = {}

    def start(
        self,
        request_id: str,
        num_computed_tokens: int,
        block_ids: BlockIds,
        is_loaded: bool = False,
    ) -> None:
        """Notes a request that begins, or resumes after preemption.

        Args:
            num_computed_tokens: How many of its first tokens are in the prefix cache.
            is_loaded: Whether a connector has loaded some of them.
        """
        self._read.pop(request_id, None)
        self._blocks.start(request_id, block_ids, num_computed_tokens, is_loaded)

    def extend(self, request_id: str, block_ids: BlockIds) -> None:
        """Notes the request's new blocks, by their ids for each cache group."""
        self._blocks.extend(request_id, block_ids)

    def forget(self, request_id: str) -> None:
        """Drops a finished request."""
        self._read.pop(request_id, None)
        self._blocks.forget(request_id)

    def take(
        self,
        request_ids: Sequence[str],
        token_ids: np.ndarray,
        known: np.ndarray,
        sampled: np.ndarray,
        num_sampled: np.ndarray,
        reads: np.ndarray,
    ) -> CommittedTokens | None:
        """Chooses the tokens to read now, and counts them as read; None: there are none.

        Args:
            token_ids: int ``[requests, max_len]``: the tokens of each request.
            known: int ``[requests]``: how many of these tokens the target has read with this step,
                drafts not counted.
            sampled: int ``[requests, W]``: the tokens that this step emitted.
            num_sampled: int ``[requests]``: how many of those each request emitted.
            reads: bool ``[requests]``: whether the draft reads a request.
        """
        ends = known + num_sampled
        readers = {request_ids[row]: row for row in np.flatnonzero(reads).tolist()}
        starts, counts, taken = self._take_each(readers, ends)
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
        self, readers: Mapping[str, int], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """First position, unread tokens and tokens to read now, int64 ``[requests]`` each."""
        starts, counts, taken = np.zeros((3, len(ends)), dtype=np.int64)
        left = self.budget
        has_begun = (request_id for request_id in readers if request_id in self._read)
        for request_id in [*has_begun, *self._blocks.beginning(readers)]:
            row = readers[request_id]
            start = self._read.get(request_id)
            if start is None:
                start, _ = self._blocks.unread(request_id)
            counts[row] = max(int(ends[row]) - start, 0)
            starts[row], taken[row] = start, min(int(counts[row]), left)
            if taken[row] > 0:
                left -= int(taken[row])
                self._note_read(request_id, start, start + int(taken[row]))
        return starts, counts, taken

    def _note_read(self, request_id: str, start: int, end: int) -> None:
        self._blocks.begin(request_id)
        self._read[request_id] = end
        self._blocks.read(request_id, start, end)
