"""Which steps an engine times in its warm-up: how many requests, and nodes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# In a pass: beyond, one more token costs what the last ones did.
_MOST_TOKENS = 256


@dataclass(frozen=True)
class Point:
    """One kind of step.

    Attributes:
        requests: In the batch.
        nodes: Of the tree of each, root included; 1: a plain decoding step.
    """

    requests: int
    nodes: int

    @property
    def tokens(self) -> int:
        """In the target's pass."""
        return self.requests * self.nodes


def points_to_time(
    drafts_by_batch: Sequence[int], most_tokens: int, fewer: Sequence[int] | None = None
) -> list[Point]:
    """The steps to time, the most telling first: plain, a whole tree, and those around it.

    How long a pass over more tokens takes than one request's tree has is seen with several
    requests.

    Args:
        drafts_by_batch: Drafts of each request at batch sizes 1, 2, ...: as the engine will run.
        most_tokens: Of the engine's passes.
        fewer: Other numbers of drafts that one request runs with in the same way: there are
            CUDA graphs for these. None: every number is alike, at any batch size.

    Returns:
        The first is a plain step of one request; numbers of tokens are distinct.
    """
    batches = _powers(len(drafts_by_batch))
    drafts = {size: drafts_by_batch[size - 1] for size in batches}
    if fewer is None:
        most = max(drafts_by_batch)
        drafts = dict.fromkeys(batches, most)
        fewer = [nodes - 1 for nodes in reversed(_powers(most))]
    whole = [Point(size, drafts[size] + 1) for size in batches if drafts[size] > 0]
    smaller = [Point(1, number + 1) for number in fewer if 0 < number < drafts[1]]
    found = {1: Point(1, 1)}
    for point in [*whole[:1], *_in_turns(smaller, whole[1:])]:
        # One slot more for each: vLLM keeps it for the draft.
        if point.tokens <= _MOST_TOKENS and point.tokens + point.requests <= most_tokens:
            found.setdefault(point.tokens, point)
    return list(found.values())


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to ``most``."""
    return [1 << bit for bit in range(most.bit_length())]


def _in_turns(below: Sequence[Point], above: Sequence[Point]) -> list[Point]:
    found = []
    for place in range(max(len(below), len(above))):
        found += [*below[place : place + 1], *above[place : place + 1]]
    return found
