# mypy: allow-untyped-defs
"""Divides requests of very different rows and contexts among a fixed number of programs.

One captured launch serves prompts beside trees, and short contexts beside long ones. Only the
device knows them. So a launch before the layers decides there how long a split is: every program
then has about its share of the work, and a long context is read by as many programs as it needs.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.tree_attention_kernels import PLAN_COLUMNS, window_start

_AT_ONCE = 128


@dataclass(frozen=True)
class SplitPlan:
    """What each program of `tree_attention` takes; its first launch writes it."""

    requests: Tensor
    """int32 ``[R, 4]``: blocks in a split (of all alike), and the first of a request's programs,
    of its partial results (-1: it has one split), and of its tiles that are merged."""
    programs: Tensor  # int32: request of each program of a key head; -1: it has nothing to do
    merged: Tensor  # int32: request of each tile whose splits are merged; -1: none

    @classmethod
    def launch(
        cls,
        tree: Any,
        rows: int,
        tiles: int,
        at_once: int,
        window: int,
        constants: dict[str, int],
    ) -> "SplitPlan":
        """Plans the launches of layers that are alike.

        Args:
            tree: As in `tree_attention`.
            rows: Rows of a tile.
            tiles: Most tiles of all requests, for one key head.
            at_once: Programs of a key head to share the work among. Fewer splits are merged than
                twice as many, and fewer tiles than that.
            window: The layers' window; 0: none.
            constants: Those that `tree_attention`'s kernels have in common.
        """
        requests, like = len(tree.context_lens), tree.context_lens
        plan = cls(
            like.new_empty(requests, PLAN_COLUMNS),
            like.new_empty(tiles + at_once),
            like.new_empty(at_once),
        )
        names = ("GROUP", "KEYS", "MIN_BLOCKS", "WINDOWED")
        plan_splits_kernel[(requests + 1,)](
            like, tree.query_start_loc, plan.requests, plan.programs, plan.merged,
            requests, len(plan.programs), at_once, window, tree.first,
            ROWS=rows, REQUESTS=triton.next_power_of_2(requests), AT_ONCE=_AT_ONCE,
            COLUMNS=PLAN_COLUMNS, **{name: constants[name] for name in names},
        )  # fmt: skip
        return plan


@triton.jit
def _fill(places, first, count, end, value, AT_ONCE: tl.constexpr):
    """Writes ``value`` to ``count`` places from ``first`` on, before ``end``."""
    for start in tl.range(0, count, AT_ONCE):
        offset = start + tl.arange(0, AT_ONCE)
        place = first + offset
        written = (offset < count) & (place < end)
        tl.store(places + place, tl.zeros_like(offset) + value, mask=written)


@triton.jit(
    do_not_specialize=["num_requests", "num_programs", "at_once", "window", "first_node"],
    do_not_specialize_on_alignment=[
        "context_lens",
        "query_start_loc",
        "plan",
        "programs",
        "merged",
    ],
)
def plan_splits_kernel(
    context_lens, query_start_loc, plan, programs, merged,
    num_requests, num_programs, at_once, window, first_node,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    WINDOWED: tl.constexpr, REQUESTS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes a `SplitPlan`. Grid: (requests + 1,): the last program marks who has nothing to do."""
    this = tl.program_id(0)
    request = tl.arange(0, REQUESTS)
    exists = request < num_requests
    first_token = tl.load(query_start_loc + request, mask=exists, other=0)
    queries = tl.load(query_start_loc + request + 1, mask=exists, other=0) - first_token
    has_rows = queries > 0
    context = tl.load(context_lens + request, mask=has_rows, other=0)
    begin = window_start(context, window, KEYS) if WINDOWED else 0
    tiles = tl.cdiv(queries * GROUP, ROWS)
    blocks = tl.where(has_rows, tl.cdiv(context + first_node + queries - begin, KEYS), 0)
    split_blocks = tl.maximum(tl.cdiv(tl.sum(tiles * blocks), at_once), MIN_BLOCKS)
    splits = tl.cdiv(blocks, split_blocks)
    taken, is_split = tiles * splits, splits > 1
    joined = tl.where(is_split, tiles, 0)
    earlier = request < this
    first = tl.sum(tl.where(earlier, taken, 0))
    first_merged = tl.sum(tl.where(earlier, joined, 0))
    count = tl.sum(tl.where(request == this, taken, 0))
    count_merged = tl.sum(tl.where(request == this, joined, 0))
    value = this
    if this == num_requests:
        value = -1
        count = num_programs - first
        count_merged = at_once - first_merged
    else:
        row = plan + this * COLUMNS
        tl.store(row, split_blocks)
        tl.store(row + 1, first)
        first_partial = tl.sum(tl.where(earlier & is_split, taken, 0))
        tl.store(row + 2, tl.where(count_merged > 0, first_partial, -1))
        tl.store(row + 3, first_merged)
    _fill(programs, first, count, num_programs, value, AT_ONCE)
    _fill(merged, first_merged, count_merged, at_once, value, AT_ONCE)
