"""Tracks blocks of the KV cache that the draft has filled: vLLM's prefix cache does not know."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

BlockIds = Sequence[Sequence[int]]  # of a request, for each cache group

NULL_BLOCK = 0
"""The first block of vLLM's pool, which no request ever gets."""


class DraftBlocks:
    """Follows the blocks of requests from when they are given out until the draft has read them.

    vLLM shares a block of a prompt once the target computes it. The draft may be behind, and the
    next request with that block would start on keys that were never written. So a new block counts
    as holding nothing of the draft's. It is *filled* when the draft has read the tokens of all of
    it. Blocks are known by their ids, which vLLM takes from one pool for all cache groups. A filled
    block that is not known costs a second reading. One wrongly taken for filled costs acceptance.

    vLLM's null block, in place of those before a sliding window, counts as filled.

    A request begins to read where the blocks that it found are not filled. In a pass, requests that
    begin come last, in the order in which they started: the prefix cache may share blocks that an
    earlier one fills in this same pass.

    Args:
        block_sizes: Tokens per block of each cache group that has layers of the draft, by index
            of the group.
    """

    def __init__(self, block_sizes: Mapping[int, int]) -> None:
        self._block_sizes = dict(block_sizes)
        self._blocks: dict[Hashable, dict[int, list[int]]] = {}
        self._filled = {NULL_BLOCK}
        # Tokens that a request found in the prefix cache, until it begins to read; in order.
        self._cached: dict[Hashable, int] = {}

    @property
    def step(self) -> int:
        """A number of tokens: blocks end only at its multiples."""
        return math.gcd(*self._block_sizes.values()) or 1

    def start(
        self,
        request: Hashable,
        block_ids: BlockIds,
        num_computed_tokens: int,
        is_loaded: bool = False,
    ) -> None:
        """A request begins, or resumes after preemption.

        Args:
            num_computed_tokens: How many of its first tokens are in the prefix cache. The blocks of
                the others hold nothing yet.
            is_loaded: Whether a connector has loaded some of them: no block holds anything then.
        """
        self.forget(request)
        self._cached[request] = num_computed_tokens
        self._blocks[request] = {group: list(block_ids[group]) for group in self._block_sizes}
        for size, blocks in self._sized_blocks(request):
            self._given_anew(blocks[0 if is_loaded else num_computed_tokens // size :])

    def beginning(self, requests: Iterable[Any]) -> dict[Any, int]:
        """The requests that have not begun to read, and their places among these.

        They come in the order in which they started.
        """
        if not self._cached:
            return {}
        places = {request: place for place, request in enumerate(requests)}
        return {request: places[request] for request in self._cached if request in places}

    def unread(self, request: Hashable) -> tuple[int, int]:
        """Where a request would begin to read, and how many tokens it found from there on."""
        cached = self._cached[request]
        start = self.filled_tokens(request, cached)
        return start, cached - start

    def begin(self, request: Hashable) -> None:
        """The request has begun to read, or never will."""
        self._cached.pop(request, None)

    def extend(self, request: Hashable, block_ids: BlockIds) -> None:
        """A request gets more blocks, whose ids are given for each cache group."""
        for group, blocks in self._blocks[request].items():
            blocks += block_ids[group]
            self._given_anew(block_ids[group])

    def forget(self, request: Hashable) -> None:
        """The request has finished; what its blocks hold may still be shared."""
        self._blocks.pop(request, None)
        self._cached.pop(request, None)

    def filled_tokens(self, request: Hashable, limit: int) -> int:
        """How many of a request's first ``limit`` tokens lie in filled blocks of all groups."""
        filled = (
            size * sum(1 for _ in takewhile(self._filled.__contains__, blocks[: limit // size]))
            for size, blocks in self._sized_blocks(request)
        )
        return min(filled, default=limit)

    def read(self, request: Hashable, start: int, end: int) -> None:
        """The draft reads a request up to ``end``, from where it has read or found blocks."""
        blocks = self._blocks[request]
        for group, size in self._block_sizes.items():
            self._filled.update(blocks[group][start // size : end // size])

    def _given_anew(self, block_ids: Iterable[int]) -> None:
        self._filled.difference_update(block_ids)
        self._filled.add(NULL_BLOCK)

    def _sized_blocks(self, request: Hashable) -> list[tuple[int, list[int]]]:
        blocks = self._blocks[request]
        return [(size, blocks[group]) for group, size in self._block_sizes.items()]
