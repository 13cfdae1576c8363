"""Which steps to capture CUDA graphs for, so that decode steps of every batch size find one.

A full graph is for a number of requests with a number of tokens each. Smaller batches are padded to
it. Only steps that a schedule can reach are captured: the batches of each of its ranges, and some
smaller ones, which occur while requests finish: drafts are then still those of a larger batch.

`ContextRule` says when vLLM's FlashAttention reads the contexts of a step's trees, and our kernel
the rest: docs/internals.md says why.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sequoia_vllm.hardware.budget import in_ranges

MOST_TOKENS = 1024  # tokens of the largest captured step: larger ones outlast their launches

# So far padding costs little: by datasheets arithmetic outlasts reading from 117 to 419 tokens on.
_FEW_TOKENS = 128

MIXED_TOKENS = 512  # tokens of the largest step with prompts that is captured; vLLM's own limit


def decode_shapes(
    tokens_by_batch: Sequence[int],
    most_tokens: int,
    others: Sequence[int] = (),
    most_by_batch: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Full graphs for decode steps: (tokens of each request, requests).

    Up to 8 requests nothing is padded. Above, padding is less than an eighth of the requests, or up
    to half of them in steps of few tokens, whose weights take longer than their arithmetic. Where
    the schedule drafts nothing the sizes are vLLM's own. Some graphs are for one token of each
    request: batches in which no request can draft.

    Args:
        tokens_by_batch: Tokens of each request at batch sizes 1, 2, ...: its drafts and one.
        most_tokens: Most tokens of a step; larger ones are not captured.
        others: Tokens of each request that an adapting engine may change over to.
        most_by_batch: At most so many at batch sizes 1, 2, ...; none: as ``tokens_by_batch``.
    """
    most_requests = min(len(tokens_by_batch), most_tokens)
    shapes = {(1, requests) for requests in powers_of_two(most_requests)}
    for first, last, tokens in in_ranges(tokens_by_batch):
        most = min(last, most_tokens // tokens)
        grid = _plain_grid(most) if tokens == 1 else _tree_grid(most, tokens)
        shapes |= {(tokens, requests) for requests in grid if requests >= (first + 1) // 2}
    for tokens in others:
        last = last_with(tokens, most_by_batch or tokens_by_batch)
        most = min(last, most_tokens // tokens)
        shapes |= {(tokens, requests) for requests in half_octaves(most)}
    return sorted(shapes)


def mixed_shapes(max_num_seqs: int, most_tokens: int) -> list[tuple[int, int]]:
    """Full graphs for steps that read prompts, too: (tokens, most requests), the smallest first. Up
    to 256 tokens padding costs little: see `_FEW_TOKENS`. Requests that a step does not have cost a
    launch's empty programs, so some are for few. With one request no step is mixed."""
    last = min(MIXED_TOKENS, most_tokens)
    sizes = {*range(32, 128, 32), *range(128, last, 64), last}
    requests = sorted({min(most, max_num_seqs) for most in (8, 32, 128, max_num_seqs)} - {1})
    return [
        (tokens, most)
        for tokens in sorted(size for size in sizes if size <= last)
        for most in requests
        if 2 * most <= tokens and (tokens <= 32 * most or most == max_num_seqs)
    ]


def capture_sizes(tokens_by_batch: Sequence[int], budget: int) -> list[int]:
    """Sizes of graphs for steps of any kind, in tokens, ascending; the last is the ceiling of all.
    They reach as far as `decode_shapes` needs, up to `MOST_TOKENS`, no less than vLLM's."""
    by_batch = list(enumerate(tokens_by_batch, start=1))
    decoding = max((b * tokens for b, tokens in by_batch if b * tokens <= MOST_TOKENS), default=1)
    mixed = min(MIXED_TOKENS, 2 * len(tokens_by_batch) * max(tokens_by_batch))
    last = min(max(decoding, mixed), budget)
    small = {size for size in (1, 2, 4, *range(8, 128, 8)) if size < last}
    return sorted(small | {size for size in _grid(last) if size >= 128} | {last})


def first_beyond(tokens_by_batch: Sequence[int], most_tokens: int) -> int | None:
    """The smallest batch whose trees have more tokens than any graph; None: there is none."""
    by_batch = enumerate(tokens_by_batch, start=1)
    return next((b for b, tokens in by_batch if tokens > 1 and b * tokens > most_tokens), None)


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, 8, ..., ``last``."""
    return sorted({*(1 << power for power in range(last.bit_length())), last} - {0})


def half_octaves(last: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ..., ``last``: batches are padded by at most half of their size."""
    powers = powers_of_two(last)
    sizes = {*powers, *(power + power // 2 for power in powers)}
    return sorted(size for size in sizes if size <= last)


def last_with(number: int, by_batch: Sequence[int]) -> int:
    """The largest batch of 1, 2, ... requests that has so many of something, or more; 0: none."""
    reached = (batch for batch, most in enumerate(by_batch, start=1) if most >= number)
    return max(reached, default=0)


def _grid(last: int) -> Iterator[int]:
    """Every number up to 16, then eight in each octave, and ``last``."""
    number = 1
    while number < last:
        yield number
        number += 1 << max(number.bit_length() - 4, 0)
    if last > 0:
        yield last


def _tree_grid(last: int, tokens: int) -> set[int]:
    """`_grid` of steps with so many tokens of each request, but `half_octaves` where few do."""
    few = _FEW_TOKENS // tokens
    coarse = {*range(1, 9), *half_octaves(few), last}
    return {number for number in _grid(last) if number > few or number in coarse}


def _plain_grid(last: int) -> set[int]:
    """vLLM's own: 1, 2, 4, multiples of 8 and from 256 on of 16; beyond it of 64; and ``last``."""
    own = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, last, 64), last)
    return {number for number in own if 0 < number <= last}


class ContextRule(NamedTuple):
    """The steps in which FlashAttention reads the contexts."""

    rows: int  # least rows of the largest tree, its root included
    product: int  # least sum over a step's trees of rows times tokens of context

    def holds(self, rows: NDArray[np.int64], contexts: NDArray[np.int64]) -> bool:
        """Whether a step is such a one.

        Args:
            rows: int ``[R]``: rows of each request's tree; 0: it has none.
            contexts: int ``[R]``: tokens before them.
        """
        return bool(rows.max(initial=0) >= self.rows and (rows * contexts).sum() >= self.product)


# Both limits are estimates for 8B targets on an H100 until a GPU has timed them.
_ESTIMATED = ContextRule(rows=32, product=64 * 8192)
_RAN_ON: str | None = None  # the GPU on which its limits were measured here; None: none


def usual_rule(on_cpu: bool) -> ContextRule | None:
    """The rule of an engine; None: our kernel reads all contexts, also until a GPU ran the rule."""
    return _ESTIMATED if _RAN_ON and not on_cpu else None
