"""How many drafts the scheduler's token budget has room for, by batch size.

vLLM's scheduler hands out `max_num_batched_tokens` per step to the running requests first. If whole
trees take all of it, running requests wait for each other and no prompt is read. So trees get a
share of the budget, and larger batches draft a smaller prefix of the tree.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

Ranges = list[tuple[int, int, int]]
"""vLLM's ``num_speculative_tokens_per_batch_size``: (first, last, drafts), from 1, ascending."""

TREE_SHARE = 0.5  # share of a step's tokens that trees may take; the rest is for prompts

MOST_TREE_TOKENS = 1024
"""Tokens of all trees in a step, whatever the budget, where weights lie on the device.

Scoring 1,024 tokens is bound by arithmetic on every device of the library. Arithmetic begins to
count at about 200 tokens. From there more drafts cost what more requests would. Where a step waits
for weights from the host, it begins to count much later.
"""

# Trees whose numbers of nodes differ by less than this factor need not both be chosen among.
_ALIKE = 1.3

SMALLEST_TREE = 4
"""Fewest nodes of a tree, root included. Where even so few do not fit, nothing is drafted."""


def fit_to_budget(
    schedule: Sequence[tuple[int, int, int]],
    drafts: int,
    max_num_seqs: int,
    budget: int,
    offloaded: bool = False,
) -> Ranges:
    """A schedule whose trees leave room for prompts at every batch size: itself where it all fits.

    Where a batch's trees take more than their share, each request drafts the largest smaller tree
    that fits and has a power of two of nodes: few batch sizes then need CUDA graphs of their own.

    Args:
        drafts: Nodes of the engine's tree, without its root.
        budget: Most tokens of a step (vLLM's ``max_num_batched_tokens``).
        offloaded: Whether the target's weights are read from outside the device in every pass.
    """
    wanted = drafts_by_batch(schedule, drafts, max_num_seqs)
    share = int(budget * TREE_SHARE)
    most = share if offloaded else min(share, MOST_TREE_TOKENS)
    fitting = [_fitting(count, batch, most) for batch, count in enumerate(wanted, start=1)]
    if fitting == wanted:
        return list(schedule)
    return in_ranges(fitting)


def in_ranges(drafts: Iterable[int]) -> Ranges:
    """Drafts at batch sizes 1, 2, ... as ranges of batch sizes with as many."""
    ranges, last = [], 0
    for count, sizes in groupby(drafts):
        first, last = last + 1, last + len(list(sizes))
        ranges.append((first, last, count))
    return ranges


def _fitting(drafts: int, batch: int, most: int) -> int:
    if batch * (drafts + 1) <= most:
        return drafts
    nodes = min(most // batch, drafts)
    return (1 << nodes.bit_length() - 1) - 1 if nodes >= SMALLEST_TREE else 0


def rungs(scheduled: Iterable[int], between: bool = False) -> list[int]:
    """Numbers of drafts to choose among, from the largest down, without 0.
    Each has about half as many nodes as the one before it, or nearly so many that the schedule
    needs no graph more. ``between``: also one between each and the next, without CUDA graphs."""
    numbers = sorted(set(scheduled) - {0})
    drafts = max(numbers, default=0)
    found = []
    while drafts > 0:
        found.append(drafts)
        half = (drafts + 1) / 2
        alike = [n for n in numbers if half / _ALIKE <= n + 1 <= half * _ALIKE]
        drafts = min(alike, key=lambda n: abs(n + 1 - half), default=int(half) - 1)
    if between:
        found += [(more + fewer) // 2 for more, fewer in pairwise(found)]
    return sorted(set(found), reverse=True)


def checked_ranges(schedule: Ranges) -> Ranges:
    """The ranges of a schedule in order.

    Raises:
        ValueError: They do not follow each other from batch size 1.
    """
    if not schedule:
        raise ValueError("needs a range, [first, last, drafts]; leave the key out for none")
    batch = 1
    for first, last, drafts in sorted(schedule):
        entry = [first, last, drafts]
        if first < 1:
            raise ValueError(f"{entry} begins at batch size {first}: the smallest is 1")
        if last < first:
            raise ValueError(f"{entry} ends before it begins: give [first, last, drafts]")
        if drafts < 0:
            raise ValueError(f"{entry} has {drafts} drafts: give 0 to turn speculation off")
        if first < batch:
            raise ValueError(f"{entry} repeats batch size {first}: give each batch size once")
        if first > batch:
            missing = str(batch) if first == batch + 1 else f"{batch} to {first - 1}"
            raise ValueError(f"no range has batch size {missing}, before {entry}")
        batch = last + 1
    return sorted(schedule)


def drafts_by_batch(
    schedule: Sequence[tuple[int, int, int]], drafts: int, max_num_seqs: int
) -> list[int]:
    """Drafts of each request at batch sizes 1 to ``max_num_seqs``, at most ``drafts``.
    Ranges of (first, last, drafts) are read in any order, as by vLLM: each goes on until the next
    one begins."""
    ranges = sorted(schedule)
    found = []
    current = 0
    for batch in range(1, max_num_seqs + 1):
        while current + 1 < len(ranges) and ranges[current + 1][0] <= batch:
            current += 1
        found.append(min(ranges[current][2], drafts))
    return found


def beyond_budget(
    schedule: Sequence[tuple[int, int, int]], drafts: int, max_num_seqs: int, budget: int
) -> tuple[int, int] | None:
    """The smallest batch that does not fit in one step, and its tokens; None: all fit. Each request
    has one more slot, which vLLM keeps free for the draft model."""
    for batch, count in enumerate(drafts_by_batch(schedule, drafts, max_num_seqs), start=1):
        tokens = batch * (count + 2)
        if count and tokens > budget:
            return batch, tokens
    return None


def warm_up_length(nodes: int) -> int:
    """The shortest ``max_model_len``, in tokens, with which vLLM's GPU worker may warm up. Its
    requests have prompts a token longer than a tree, then a tree, then two single tokens; past it
    they would use what follows their row of the block table."""
    return (nodes + 1) + nodes + 2
