# mypy: allow-untyped-defs
"""Starts a drafting pass, in one launch: what a batch reads, and which requests get drafts.

`sequoia_vllm.drafting.draft_batch.DraftBatch.begin` launches it.
"""

import triton
import triton.language as tl

from sequoia_vllm.kernels import modes as draft_modes

_SKIP = tl.constexpr(draft_modes.SKIP)
REQUESTS_AT_ONCE = 512
"""One program takes all requests, as rows of each begin after those of all before it."""


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "max_requests",
        "tree_size",
        "rows_per_tree",
        "longest",
        "max_trees",
        "state_offset",
    ]
)
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

    Args:
        requests: int32 or int64 ``[R]``: slot of each, all different.
        computed: int32 ``[S]``: tokens in the target's cache.
        num_sampled: int32 ``[R]``: tokens that the step sampled; the last of them is
            committed, but not in the target's cache.
        bounds: int32 ``[R]``: most tokens to read.
        seq_lens: int32 ``[R]``: tokens of each in the target's pass, contexts included.
        query_start_loc: int32 ``[R + 1]``: first row of each in the target's pass, then the end.
        all_modes: int32 ``[S]``, of `sequoia_vllm.kernels.modes`.
        most_nodes: int32 ``[S]``: the request has no more nodes than this to verify.
        all_temperatures: float32 ``[S]``.
        all_top_k, all_top_p, all_min_p: int32, float32 and float32 ``[S]``.
        all_seeds: int64 ``[S]``.
        read: int32 ``[S]``, read and written: tokens that the draft has read.
        num_nodes: int32 ``[S]``, 0, written for the requests of the batch: nodes of its tree to
            verify, root included, or 0.
        rows: int32 ``[S]``, written for the requests of the batch: the first of the rows
            in which its draft logits are kept.
        num_requests, max_requests: R and M.
        tree_size: Nodes of the trees.
        rows_per_tree: Rows of draft logits of each tree.
        longest: No tree where the root's position reaches it.
        max_trees: Nor in rows from this one on.
        state_offset: 0 or 1, the hidden-state offset: the draft reads a token at its position
            less this. With 1 the first token of a request is not read.
        slots, starts, counts, first_rows, last_rows, computed_before, roots, contexts, modes,
            temperatures, top_k, top_p, min_p, seeds: ``[M]``, written: the attributes of
            `DraftBatch`; ``first_rows`` has M + 1. The last five for R requests only.
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
