"""Tracks blocks of the KV cache that the draft has filled: vLLM's prefix cache does not know."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import takewhile

BlockIds = Sequence[Sequence[int]]  # of a request, for each cache group

NULL_BLOCK = 0
"""The first block of vLLM's pool, which no request ever gets."""


class DraftBlocks:
    """Follows the blocks of requests from when they are given out until the draft has read them.

    vLLM shares a block of a prompt once the target computes it. The draft may be behind, or read
    nothing at all where a schedule says 0 drafts. A request that finds the block in the prefix
    cache would then start on keys that were never written. So a new block of a request counts as
    holding nothing of the draft's. It is *filled* when the draft has read the tokens of all of it.
    Blocks are known by their ids, which vLLM takes from one pool for all cache groups.

    A filled block that is not known as such costs the draft a second reading; one
    that is wrongly taken for filled would cost accepted drafts.

    Where a group's layers have a sliding window, vLLM gives requests its null block in
    place of those that lie before the window. Nobody reads or writes these, so they
    count as filled.

    Both runners' progress of models tells it when requests begin, get blocks and finish, and
    calls `read` when a drafting pass reads their tokens.

    Args:
        block_sizes: Tokens per block of each cache group that has layers of the
            draft, by index of the group.
    """

    def __init__(self, block_sizes: Mapping[int, int]) -> None:
        self._block_sizes = dict(block_sizes)
        self._blocks: dict[Hashable, dict[int, list[int]]] = {}
        self._filled = {NULL_BLOCK}

    @property
    def step(self) -> int:
        """A number of tokens: blocks end only at its multiples."""
        return math.gcd(*self._block_sizes.values()) or 1

    def start(self, request: Hashable, block_ids: BlockIds, num_computed_tokens: int) -> None:
        """A request begins, or resumes after preemption.

        Args:
            num_computed_tokens: How many of its first tokens are in the prefix cache; the
                blocks of the others hold nothing yet.
        """
        self._blocks[request] = {group: list(block_ids[group]) for group in self._block_sizes}
        for size, blocks in self._sized_blocks(request):
            self._given_anew(blocks[num_computed_tokens // size :])

    def extend(self, request: Hashable, block_ids: BlockIds) -> None:
        """A request gets more blocks, whose ids are given for each cache group."""
        for group, blocks in self._blocks[request].items():
            blocks += block_ids[group]
            self._given_anew(block_ids[group])

    def forget(self, request: Hashable) -> None:
        """The request has finished; what its blocks hold may still be shared."""
        self._blocks.pop(request, None)

    def filled_tokens(self, request: Hashable, limit: int) -> int:
        """How many of a request's first ``limit`` tokens lie in filled blocks of all groups."""
        filled = (
            size * sum(1 for _ in takewhile(self._filled.__contains__, blocks[: limit // size]))
            for size, blocks in self._sized_blocks(request)
        )
        return min(filled, default=limit)

    def read(self, request: Hashable, start: int, end: int) -> None:
        """The draft reads a request from position ``start`` up to ``end``.

        What lies before ``start`` it has read, or found in filled blocks.
        """
        blocks = self._blocks[request]
        for group, size in self._block_sizes.items():
            self._filled.update(blocks[group][start // size : end // size])

    def _given_anew(self, block_ids: Iterable[int]) -> None:
        self._filled.difference_update(block_ids)
        self._filled.add(NULL_BLOCK)

    def _sized_blocks(self, request: Hashable) -> list[tuple[int, list[int]]]:
        blocks = self._blocks[request]
        return [(size, blocks[group]) for group, size in self._block_sizes.items()]
