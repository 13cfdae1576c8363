# mypy: allow-untyped-defs
"""Starts a drafting pass: what a batch reads, which requests get drafts, and what texts say.

`sequoia_vllm.drafting.draft_batch.DraftBatch.begin` launches the first kernel. The second is
`verification.retrieval.continuations` in Triton, and follows `predictions`.
"""

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels import modes as draft_modes
from sequoia_vllm.kernels.predictions import _BRANCHES, _PROMPT, follow_prediction
from sequoia_vllm.verification.prediction import BRANCH_GROWTH, BRANCH_RUN
from sequoia_vllm.verification.retrieval import LONGEST, SHORTEST

_SKIP = tl.constexpr(draft_modes.SKIP)
_BRANCH_RUN, _BRANCH_GROWTH = tl.constexpr(BRANCH_RUN), tl.constexpr(BRANCH_GROWTH)
REQUESTS_AT_ONCE = 512
"""One program takes all requests, as rows of each begin after those of all before it."""
_BLOCK, _WARPS = 1024, 4


@triton.jit(
    do_not_specialize=[
        "num_requests", "max_requests", "tree_size", "rows_per_tree", "longest", "max_trees",
        "state_offset",
    ]
)  # fmt: skip
def begin_drafting_kernel(
    requests, computed, num_sampled, bounds, seq_lens, query_start_loc, all_modes, most_nodes,
    all_temperatures, all_top_k, all_top_p, all_min_p, all_seeds, read, num_nodes, rows,
    num_requests, max_requests, tree_size, rows_per_tree, longest, max_trees, state_offset, slots,
    starts, counts, first_rows, last_rows, computed_before, roots, contexts, modes, temperatures,
    top_k, top_p, min_p, seeds, BLOCK: tl.constexpr,
):  # fmt: skip
    """Takes R requests from tables of S request slots into a batch of M >= R rows, one per lane.

    A request reads its committed tokens that it has not read yet, up to its bound. These count as
    read from now on. It gets a tree if nothing is left to read, and if a token was sampled to draft
    after. Its mode, length and row must allow a tree, too. Rows from R on are padding: slot -1,
    mode SKIP, lengths 0. Grid: one program.

    Read and written in batch order are the arguments of `DraftBatch.begin` and its attributes (of
    the last five only R rows), and by request slot `SlotStates`, where ``num_nodes`` and ``rows``
    are ``drafted_nodes``, all 0 before, and ``drafted_rows``. With a hidden-state offset of 1, the
    ``state_offset``, the first token of a request is not read.
    """
    total = 0
    tl.store(first_rows, 0)
    for first in range(0, max_requests, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < max_requests
        is_request = row < num_requests
        slot = tl.load(requests + row, mask=is_request, other=-1).to(tl.int64)
        sampled = tl.load(num_sampled + row, mask=is_request, other=0) > 0
        start = tl.load(read + slot, mask=is_request, other=0)
        end = tl.load(computed + slot, mask=is_request, other=0) + sampled.to(tl.int32)
        bound = tl.load(bounds + row, mask=is_request, other=0)
        # With an offset of 1, the last row of a prompt's chunk takes the token after that chunk.
        readable = end - state_offset * sampled.to(tl.int32)
        count = tl.maximum(tl.minimum(readable - start, bound), 0)
        root = tl.maximum(end - 1, 0)
        mode = tl.load(all_modes + slot, mask=is_request, other=_SKIP)
        tl.store(slots + row, slot, mask=exists)
        tl.store(starts + row, start, mask=exists)
        tl.store(counts + row, count, mask=exists)
        end_row = total + tl.cumsum(count, 0)
        total += tl.sum(count, 0)
        tl.store(first_rows + 1 + row, end_row, mask=exists)
        tl.store(last_rows + row, tl.maximum(end_row - 1, 0).to(tl.int64), mask=exists)
        before = tl.load(seq_lens + row, mask=is_request, other=0)
        before += tl.load(query_start_loc + row, mask=is_request, other=0)
        before -= tl.load(query_start_loc + 1 + row, mask=is_request, other=0)
        tl.store(computed_before + row, before, mask=exists)
        tl.store(roots + row, root, mask=exists)
        # Nodes lie behind what was read, also of a prompt whose chunk sampled nothing.
        context = tl.maximum(root - state_offset * sampled.to(tl.int32), 0)
        tl.store(contexts + row, context, mask=exists)
        tl.store(modes + row, mode, mask=exists)
        temperature = tl.load(all_temperatures + slot, mask=is_request)
        tl.store(temperatures + row, temperature, mask=is_request)
        tl.store(top_k + row, tl.load(all_top_k + slot, mask=is_request), mask=is_request)
        tl.store(top_p + row, tl.load(all_top_p + slot, mask=is_request), mask=is_request)
        tl.store(min_p + row, tl.load(all_min_p + slot, mask=is_request), mask=is_request)
        tl.store(seeds + row, tl.load(all_seeds + slot, mask=is_request), mask=is_request)

        tl.store(read + slot, start + count, mask=is_request)
        drafts = sampled & (start + count == readable) & (mode != _SKIP)
        drafts = drafts & (root < longest) & (row < max_trees)
        nodes = tl.minimum(tl.load(most_nodes + slot, mask=is_request, other=0), tree_size)
        tl.store(num_nodes + slot, tl.where(drafts, nodes, 0), mask=is_request)
        tl.store(rows + slot, row * rows_per_tree, mask=is_request)


def find_continuations(
    texts: Tensor, slots: Tensor, roots: Tensor, told: Tensor, branches: Tensor,
    predictions: Tensor, window: int,
) -> None:  # fmt: skip
    """Writes what followed the latest of the longest earlier occurrences of each text's end.

    Or what its prediction says, where as many tokens match there, up to `LONGEST`. Nothing waits
    for the device.

    Args:
        texts: int32 ``[slots, L]``: tokens by request slot; contiguous in its rows.
        slots: int64 ``[R]``: request slot of each; -1 for padding, which gets anything.
        roots: int32 ``[R]``: position of each text's last token.
        told: int64 ``[R, D]``, contiguous, written: as `continuations` returns it.
        branches: int32 ``[R]``, written: `Prediction.branch`, where requests may have one; else 0.
        predictions: int64 ``[slots]``: addresses of the predictions' records, which follow the
            texts; 0: there is none.
        window: Last tokens of a text in which a match is looked for.
    """
    continuations_kernel[(len(told),)](
        texts, texts.stride(0), texts.shape[1], slots, roots, told, told.shape[1], branches,
        window, predictions, MOST=LONGEST, LEAST=SHORTEST, BLOCK=_BLOCK,
        COLUMNS=triton.next_power_of_2(told.shape[1]), num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["texts_stride", "length", "depth", "window"],
    do_not_specialize_on_alignment=["slots", "roots", "told", "branch_lengths"],
)
def continuations_kernel(
    texts, texts_stride, length, slots, roots, told, depth, branch_lengths, window, predictions,
    MOST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One request per program; runs of ``LEAST`` to ``MOST`` tokens are matches."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    text = texts + tl.maximum(slot, 0) * texts_stride
    last = tl.minimum(tl.load(roots + request), length - 1)
    first = tl.maximum(last + 1 - window, 0)
    best = first.to(tl.int64)  # of the longest run, the latest place: that decides
    for start in range(first, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_same = place < last
        run = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MOST):
            inside = (place < last) & (place - back >= first)
            token = tl.load(text + place - back, mask=inside, other=-1)
            is_same = is_same & (token == tl.load(text + tl.maximum(last - back, first)))
            run += is_same.to(tl.int64)
        best = tl.maximum(best, tl.max((run << 32) | place.to(tl.int64), axis=0))
    found = (best & 0xFFFFFFFF).to(tl.int32)
    column = tl.arange(0, COLUMNS)
    ahead = tl.minimum(found + 1 + column % tl.maximum(last - found, 1), last)
    token = tl.load(text + ahead, mask=column < depth, other=-1)
    is_match = best >= LEAST * 4294967296
    token = tl.where(is_match, token, -1)
    branch = best.to(tl.int32) * 0
    address = tl.load(predictions + slot, mask=slot >= 0, other=0)
    if address != 0:
        record = address.to(tl.pointer_type(tl.int32))
        if last >= tl.load(record + _PROMPT):
            following, count, matched = follow_prediction(record, text, last)
            own = tl.where(is_match, best >> 32, 0)
            if (count > 0) & (tl.minimum(matched, MOST) >= own):
                is_said = column < tl.minimum(count, depth)
                token = tl.load(following + column, mask=is_said, other=-1)
                if (matched >= _BRANCH_RUN) & (tl.load(record + _BRANCHES) != 0):
                    branch = tl.minimum(_BRANCH_GROWTH * matched, count)
    tl.store(branch_lengths + request, branch)
    tl.store(told + request.to(tl.int64) * depth + column, token.to(tl.int64), mask=column < depth)
