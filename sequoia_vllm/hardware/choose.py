"""Which tree, and how much of it at each batch size (paper, sections 4.1 and G.5, extended)."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from sequoia_vllm.hardware.budget import Ranges
from sequoia_vllm.hardware.cost import CostModel, Prefixes, check_batch_sizes
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.tree import Acceptance, Frontier, TokenTree

logger = logging.getLogger("vllm.sequoia.hardware")  # shown by vLLM's own handler

MAX_DEPTH = 24
# Two speeds closer than this are the same speed: floating point must not decide.
_SAME = 1e-9
# A schedule may give away this much speed to have fewer ranges, and so fewer
# CUDA graphs and fewer switches under changing load.
_TOLERANCE = 0.01
# Trees made in one search; a few are enough unless wide draft levels are slow.
_MOST_TREES = 256
# Every size up to the first number is tried, and above it only multiples of the second. A few nodes
# more or less are worth nothing in a tree of hundreds.
_EACH_SIZE_TO, _SIZE_STEP = 128, 8
_frontier = lru_cache(maxsize=4)(Frontier.of)  # one vector is used for many profiles


class ScheduleEstimate(FileModel):
    """What the schedule is expected to do at one batch size."""

    batch_size: int = Field(ge=1)
    num_speculative_tokens: int = Field(ge=0)
    expected_tokens: float = Field(ge=1, description="Per request and step.")
    speedup: float = Field(gt=0, description="Against plain decoding at this batch size.")
    optimum: float = Field(gt=0)  # speedup of the best tree found for this batch size alone
    extrapolated: bool = False  # whether it rests on times outside what was measured


@dataclass(frozen=True)
class Schedule:
    """What an engine needs: the tree, and its prefix by batch size."""

    tree: TokenTree  # in value order; its largest prefix that any range uses
    ranges: Ranges
    """vLLM's ``num_speculative_tokens_per_batch_size``: (first, last, drafts), from batch size 1,
    ascending, without gaps; the last also stands for larger batches. 0 drafts: no speculation."""
    estimates: list[ScheduleEstimate]  # expectations at the powers of two


def choose_tree(
    acceptance: Acceptance | ArrayLike,
    profile: Profile,
    batch_size: int = 1,
    max_size: int = 128,
    max_depth: int = MAX_DEPTH,
    max_branch: int | None = None,
    context_length: int | None = None,
) -> TokenTree:
    """The tree with the most expected tokens per second at this batch size.

    It searches the optimal trees of every depth and size (`Frontier`); above 128 nodes, of every
    eighth size. A tree of size 1 means: do not speculate.

    Args:
        acceptance: p[k] or p[d][k].
        max_size: Largest tree, root included; never more than was timed at this batch size.
        max_depth: Most edges from the root to a leaf; never more than the draft has levels.
        max_branch: Most children of a node; None: as many as the vector has.
        context_length: The nearest of the profile's contexts is taken; None: its shortest.

    Raises:
        AcceptanceError: ``acceptance`` is no such vector.
        ProfileError: The batch size is below 1.
        TreeError: A limit is no whole number of at least 1.
    """
    sizes, limits = check_batch_sizes([batch_size]), (max_size, max_depth, max_branch)
    search = _TreeSearch(Acceptance.of(acceptance), profile, context_length, sizes, *limits)
    return search.best(batch_size)


def choose_schedule(
    acceptance: Acceptance | ArrayLike,
    profile: Profile,
    batch_sizes: Iterable[int] = range(1, 257),
    max_size: int = 128,
    context_length: int | None = None,
) -> Schedule:
    """One stored tree, and how many of its drafts to use at each batch size.

    Each request of a batch drafts a prefix of the tree. Candidates are the optima of single batch
    sizes, for the powers of two among ``batch_sizes``. The stored tree is the one whose prefixes
    have the highest geometric mean of speeds over these sizes.

    Args:
        batch_sizes: Those of the table; the largest also stands for all above it.
        acceptance, profile, max_size, context_length: See `choose_tree`, also for errors.
    """
    acceptance = Acceptance.of(acceptance)
    sizes = check_batch_sizes(batch_sizes)
    probes = [size for size in sizes if size & (size - 1) == 0] or sizes[:1]
    search = _TreeSearch(acceptance, profile, context_length, probes, max_size)
    cost, best = search.cost, {probe: search.best(probe) for probe in probes}
    candidates = dict.fromkeys(best.values())
    speeds = {tree: _speedups(tree, acceptance, cost, probes) for tree in candidates}
    # Equal means go to the smaller tree.
    tree = max(
        speeds,
        key=lambda tree: (round(float(np.log(speeds[tree].max(axis=1)).mean()), 9), -tree.size),
    )
    speedups = _speedups(tree, acceptance, cost, sizes)
    ranges = _ranges(speedups, sizes)
    expected_tokens = Prefixes.of(tree, acceptance).expected_tokens

    def estimate(probe: int) -> ScheduleEstimate:
        drafts = next(drafts for first, last, drafts in ranges if first <= probe <= last)
        speedup = float(speedups[sizes.index(probe), drafts])
        optimum = float(speeds[best[probe]][probes.index(probe), -1])
        return ScheduleEstimate(
            batch_size=probe,
            num_speculative_tokens=drafts,
            expected_tokens=round(float(expected_tokens[drafts]), 4),
            speedup=round(speedup, 4),
            # A prefix may have narrower levels than the tree with the most tokens, and be faster.
            optimum=round(max(optimum, speedup), 4),
            extrapolated=cost.extrapolates(drafts + 1, probe),
        )

    estimates = [estimate(probe) for probe in probes]
    if profile.source == "measured" and any(entry.extrapolated for entry in estimates):
        logger.warning(
            "Sequoia: the schedule for %s uses times outside what its profile measured; see "
            "'extrapolated' in its estimates",
            profile.device,
        )
    used = max(drafts for _, _, drafts in ranges)
    return Schedule(tree=tree.trim(used + 1), ranges=ranges, estimates=estimates)


class _TreeSearch:
    """Looks for the fastest of the optimal trees."""

    def __init__(
        self,
        acceptance: Acceptance,
        profile: Profile,
        context_length: int | None,
        batch_sizes: list[int],
        max_size: int,
        max_depth: int = MAX_DEPTH,
        max_branch: int | None = None,
    ) -> None:
        if profile.head is not None and profile.head.levels is not None:
            max_depth = min(max_depth, profile.head.levels)
        self.cost = CostModel(profile, context_length)
        timed = max(map(self.cost.max_tokens, batch_sizes))
        self._frontier = _frontier(acceptance, min(max_size, timed), max_depth, max_branch)

    def best(self, batch_size: int) -> TokenTree:
        """The fastest tree at this batch size; the root alone if plain decoding is. Trees are made
        best bound first, while they could still win; a bound times each level as one node."""
        largest = min(len(self._frontier.expected_tokens) - 1, self.cost.max_tokens(batch_size))
        sizes = np.arange(2, largest + 1)
        sizes = sizes[(sizes <= _EACH_SIZE_TO) | (sizes % _SIZE_STEP == 0) | (sizes == largest)]
        bounds = self._bounds(sizes, batch_size)
        best, best_speed = TokenTree((-1,)), 1.0 / self.cost.plain_seconds(batch_size)
        order = np.argsort(-bounds, axis=None, kind="stable")[:_MOST_TREES]
        for row, column in zip(*np.unravel_index(order, bounds.shape), strict=True):
            if bounds[row, column] <= best_speed * (1 + _SAME):
                break
            tree = self._frontier.tree(int(sizes[row]), int(column) + 1)
            prefixes = Prefixes.of(tree, self._frontier.acceptance)
            seconds = self.cost.tree_seconds(prefixes, batch_size)
            speed = float(prefixes.expected_tokens[-1] / seconds)
            if speed > best_speed * (1 + _SAME):
                best, best_speed = tree, speed
        return best

    def _bounds(self, sizes: NDArray[np.int64], batch_size: int) -> NDArray[np.float64]:
        """No tree of size n and depth d >= 1 is faster than this: ``[sizes, depths]``."""
        cost = self.cost
        tokens = self._frontier.expected_tokens[sizes, 1:]
        deeper_levels = np.arange(tokens.shape[1])
        scoring = cost.target_seconds(sizes, batch_size)
        scoring = scoring + cost.verification_seconds(sizes, batch_size)
        seconds = scoring[:, None] + cost.tree_overhead(batch_size)
        depths = deeper_levels + 1
        seconds = seconds + cost.first_draft_seconds(tokens, depths, batch_size)
        return tokens / (seconds + deeper_levels * cost.draft_seconds(1, batch_size))


def _speedups(
    tree: TokenTree, acceptance: Acceptance, cost: CostModel, batch_sizes: list[int]
) -> NDArray[np.float64]:
    """Speed of each prefix over plain decoding, ``[batches, size]``: 1 for the first, 0 for sizes
    that were not timed at a batch size, and are not used at it."""
    prefixes = Prefixes.of(tree, acceptance)
    rows = np.zeros((len(batch_sizes), tree.size))
    for row, batch_size in zip(rows, batch_sizes, strict=True):
        timed = slice(cost.max_tokens(batch_size))
        seconds = cost.prefix_seconds(prefixes, batch_size)
        row[timed] = (prefixes.expected_tokens / seconds * cost.plain_seconds(batch_size))[timed]
    return rows


def _ranges(speedups: NDArray[np.float64], batch_sizes: list[int]) -> Ranges:
    """Fewest ranges in which one prefix is within `_TOLERANCE` of the best everywhere."""
    best = speedups.max(axis=1, keepdims=True)
    good = speedups >= best * (1 - _TOLERANCE)
    # A prefix slower than plain decoding is never good enough.
    good[:, 1:] &= speedups[:, 1:] > 1 + _SAME
    begun: list[tuple[int, int]] = []  # (first batch size, drafts)
    first = 0
    while first < len(good):
        shared = good[first]
        last = first
        while last + 1 < len(good) and (shared & good[last + 1]).any():
            last += 1
            shared = shared & good[last]
        means = np.log(speedups[first : last + 1, shared]).mean(axis=0)
        # The shortest of the equally fast.
        chosen = int(np.flatnonzero(shared)[np.flatnonzero(means >= means.max() - _SAME)[0]])
        if not begun or begun[-1][1] != chosen:
            begun.append((batch_sizes[first] if begun else 1, chosen))
        first = last + 1
    # Batch sizes that nobody asked for belong to the range before them.
    lasts = [first - 1 for first, _ in begun[1:]] + [batch_sizes[-1]]
    return [(first, last, drafts) for (first, drafts), last in zip(begun, lasts, strict=True)]
