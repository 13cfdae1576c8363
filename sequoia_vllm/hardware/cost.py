"""Expected tokens per second of a tree on a profile (paper, section 4.1, extended).

The paper maximises G(n, d) / (t(n) + d c). Here t and c come from a profile,
depend on the batch size, and c on the width of each level as well:

    step(tree) = target(n) + verification(n)
                 + draft(new tokens) + sum over deeper levels draft(width) + overhead

The first draft pass of a step runs over the tokens that the last step committed. Each later pass
runs over the nodes of a level that have children.

A head that drafts all levels in one pass (DFlash) runs it over a position for each level and one
before them. Below it only draws from its distributions:

    draft(1 + depth) + sum over deeper levels drawing(width)
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sequoia_vllm.drafters.registry import drafts_in_one_pass
from sequoia_vllm.hardware.step_profile import Curve, Overhead, Profile, ProfileError
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.tree import Acceptance, TokenTree

Floats = NDArray[np.float64]


class Estimate(FileModel):
    """What one tree is expected to do at one batch size."""

    batch_size: int
    expected_tokens: float  # tokens per request and step, bonus token included
    seconds: float
    tokens_per_second: float
    speedup: float  # against plain decoding at the same batch size
    extrapolated: bool  # whether a time was read outside the measured range


class CostModel:
    """The times of a profile at any number of tokens and any batch size.

    Times are interpolated linearly over tokens, then over batch sizes. They never fall when tokens
    are added, so noise cannot make a larger tree look faster. `extrapolates` tells what lies
    outside. There the last slope goes on, and for other batch sizes the whole batch's tokens count.

    Attributes:
        max_tokens: By batch size, the largest tree size (root included) timed at it.
        target_seconds: By tokens of each request, of any shape, and batch size: a target pass.
        draft_seconds: One level of so many nodes of each request. One-pass heads only draw.
        verification_seconds: Verifying trees of so many nodes. 0: the profile has no such curve.
    """

    def __init__(self, profile: Profile, context_length: int | None = None) -> None:
        """Takes the curves at the context nearest to ``context_length``; None: the shortest."""
        self.profile = profile
        self._target = _Surface(profile.target_forward, context_length)
        self._draft = _Surface(profile.draft_level, context_length)
        reading = profile.draft_reading
        self._reading = _Surface(reading, context_length) if reading else self._draft
        self.max_tokens = self._target.max_tokens
        self.target_seconds = self._target.seconds
        self.draft_seconds = self._draft.seconds
        self.verification_seconds = _Surface(profile.verification or [], context_length).seconds
        overhead = _nearest_context(profile.overhead, context_length)
        self._overhead_batches = [entry.batch_size for entry in overhead]
        self._plain_overhead = [entry.plain_seconds for entry in overhead]
        self._tree_overhead = [entry.tree_seconds for entry in overhead]
        self._plain_seconds: dict[int, float] = {}  # the same few are asked for often

    def extrapolates(self, size: int, batch_size: int, draft_width: int = 1) -> bool:
        """Whether a tree size, level width or batch size lies outside what was timed."""
        return self._target.extrapolates(size, batch_size) or self._draft.extrapolates(
            draft_width, batch_size
        )

    def first_draft_seconds(
        self, committed: ArrayLike, depths: ArrayLike, batch_size: int
    ) -> Floats:
        """A step's first draft pass."""
        if drafts_in_one_pass(self.profile.head):
            committed = np.broadcast_to(1 + np.asarray(depths), np.shape(committed))
        return self._reading.seconds(committed, batch_size)

    def tree_overhead(self, batch_size: int) -> float:
        """The rest of a speculative step."""
        return float(np.interp(batch_size, self._overhead_batches, self._tree_overhead))

    def plain_seconds(self, batch_size: int) -> float:
        """A plain decoding step: one token of each request."""
        if batch_size not in self._plain_seconds:
            overhead = np.interp(batch_size, self._overhead_batches, self._plain_overhead)
            seconds = float(self.target_seconds(1, batch_size) + overhead)
            self._plain_seconds[batch_size] = seconds
        return self._plain_seconds[batch_size]

    def tree_seconds(self, prefixes: "Prefixes", batch_size: int) -> float:
        """Time of a step with the whole tree: the last of `prefix_seconds`."""
        last = len(prefixes.expected_tokens) - 1
        return float(self.prefix_seconds(prefixes, batch_size, last)[0])

    def prefix_seconds(self, prefixes: "Prefixes", batch_size: int, start: int = 0) -> Floats:
        """Time of a step with each prefix of a tree from entry ``start`` on, ``[size - start]``.
        Entry 0, the root alone, is plain decoding."""
        sizes = np.arange(start + 1, len(prefixes.expected_tokens) + 1)
        # Level 0 is the pass over newly committed tokens: its width is their number.
        widths = prefixes.widths[start:]
        committed, depths = prefixes.expected_tokens[start:], prefixes.depths[start:]
        first = self.first_draft_seconds(committed, depths, batch_size)
        # Each width is computed once: few are wide.
        of_width = np.zeros(int(widths.max()) + 1)
        of_width[1:] = self.draft_seconds(np.arange(1, len(of_width)), batch_size)
        deeper = of_width[widths].sum(axis=1)
        seconds = self.target_seconds(sizes, batch_size) + first + deeper
        seconds += self.verification_seconds(sizes, batch_size) + self.tree_overhead(batch_size)
        if start == 0:
            seconds[0] = self.plain_seconds(batch_size)
        return seconds

    def estimate(self, tree: TokenTree, acceptance: Acceptance, batch_size: int) -> Estimate:
        """What ``tree`` does at this batch size; the root alone is plain decoding."""
        prefixes = Prefixes.of(tree, acceptance)
        seconds = self.tree_seconds(prefixes, batch_size)
        tokens = float(prefixes.expected_tokens[-1])
        return Estimate(
            batch_size=batch_size,
            expected_tokens=tokens,
            seconds=seconds,
            tokens_per_second=batch_size * tokens / seconds,
            speedup=tokens / seconds * self.plain_seconds(batch_size),
            extrapolated=self.extrapolates(
                tree.size, batch_size, int(prefixes.widths[-1].max(initial=1))
            ),
        )


@dataclass(frozen=True)
class Prefixes:
    """Every prefix of a stored tree at once."""

    expected_tokens: Floats  # float64 ``[size]``; entry n - 1 is the first n nodes'
    widths: NDArray[np.int64]
    """int64 ``[size, depth]``: the draft's rows at each level. Entry [n - 1, d - 1] is the number
    of nodes at depth d >= 1 that have children among the first n nodes."""

    @cached_property
    def depths(self) -> NDArray[np.int64]:
        """Levels below the root of each prefix, int64 ``[size]``; of the root alone 1."""
        return 1 + (self.widths > 0).sum(axis=1)

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, tree: TokenTree, acceptance: Acceptance) -> "Prefixes":
        """The prefixes of this tree; cached, as the search looks at few trees often."""
        # Nodes are added one by one, in stored order.
        widths = np.zeros((tree.size, max(1, tree.depth)), dtype=np.int64)
        for node, children in enumerate(tree.children):
            if node and children:
                # The node needs the draft as soon as its first child is in the prefix.
                widths[children[0] :, tree.depths[node] - 1] += 1
        return cls(np.cumsum(tree.values(acceptance)), widths)


class _Surface:
    """Seconds over (tokens per request, batch size) at one context length; 0 without curves."""

    def __init__(self, curves: list[Curve], context_length: int | None) -> None:
        kept = _nearest_context(curves, context_length) if curves else []
        self.batches = [curve.batch_size for curve in kept]
        self._curves = [
            (
                np.array(curve.tokens, dtype=np.float64),
                np.maximum.accumulate(np.array(curve.seconds, dtype=np.float64)),
            )
            for curve in kept
        ]

    def max_tokens(self, batch_size: int) -> int:
        low, high, _ = self._between(batch_size)
        return int(min(self._curves[low][0][-1], self._curves[high][0][-1]))

    def extrapolates(self, tokens: int, batch_size: int) -> bool:
        inside = self.batches[0] <= batch_size <= self.batches[-1]
        return not inside or tokens > self.max_tokens(batch_size)

    def seconds(self, tokens: ArrayLike, batch_size: int) -> Floats:
        tokens = np.asarray(tokens, dtype=np.float64)
        if not self.batches:
            return np.zeros_like(tokens)
        low, high, share = self._between(batch_size)
        measured = self.batches[low]
        if low == high and measured != batch_size:
            # No curve on that side: the same work, spread over fewer or more requests.
            tokens = np.maximum(tokens * batch_size / measured, 1.0)
        below = self._along(low, tokens)
        return below if low == high else (1 - share) * below + share * self._along(high, tokens)

    def _between(self, batch_size: int) -> tuple[int, int, float]:
        """Curves on both sides of a batch size, and how far it is from the first to the second."""
        if batch_size < 1:
            raise ProfileError(f"batch size {batch_size}: a batch has at least one request")
        high = bisect_left(self.batches, batch_size)
        if high == len(self.batches):
            return high - 1, high - 1, 0.0
        if high == 0 or self.batches[high] == batch_size:
            return high, high, 0.0
        low = high - 1
        span = self.batches[high] - self.batches[low]
        return low, high, (batch_size - self.batches[low]) / span

    def _along(self, curve: int, tokens: Floats) -> Floats:
        points, seconds = self._curves[curve]
        inside = np.interp(tokens, points, seconds)
        if len(points) == 1:
            # One point says nothing of the slope; the caller is told it is extrapolated.
            return inside
        slope = (seconds[-1] - seconds[-2]) / (points[-1] - points[-2])
        return inside + slope * np.maximum(tokens - points[-1], 0.0)


Entry = TypeVar("Entry", Curve, Overhead)


def _nearest_context(entries: Sequence[Entry], context_length: int | None) -> list[Entry]:
    """The entries of the context nearest to this one (None: the shortest), by batch size."""
    contexts = {entry.context_length or 0 for entry in entries}
    wanted = context_length or 0
    nearest = min(contexts, key=lambda context: (abs(context - wanted), context))
    kept = [entry for entry in entries if (entry.context_length or 0) == nearest]
    return sorted(kept, key=lambda entry: entry.batch_size)


def check_batch_sizes(batch_sizes: Iterable[int]) -> list[int]:
    """Sorted distinct batch sizes; refuses none at all, and sizes below 1."""
    found = sorted(set(batch_sizes))
    if not found:
        raise ProfileError("no batch sizes given")
    if found[0] < 1:
        raise ProfileError(f"batch size {found[0]}: a batch has at least one request")
    return found
