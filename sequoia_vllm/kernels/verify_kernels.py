# mypy: allow-untyped-defs
"""Verification of token trees on the GPU: Algorithm 2 of arXiv 2402.12374, in Triton.

One program walks the tree of one request, and nothing waits for the host. It looks
at the vocabulary once per visited node, and once more per rejected child; no
distribution is written to memory. Where the rows' statistics are given, the first
look is taken only where a walk ends without a rejected child: at most once.

What is left of P and Q after rejections is in closed form, see `target_statistics`.

Rounding moves the emitted law by some 1e-6: a residual whose small c makes its
rounding large is reached with probability c.
"""

import triton
import triton.language as tl

from sequoia_vllm.kernels import modes as draft_modes
from sequoia_vllm.kernels.children_kernels import draft_probability
from sequoia_vllm.kernels.random import RESIDUAL, VERIFY, uniform64
from sequoia_vllm.kernels.target_statistics import (
    draw_residual,
    merge_statistics,
    next_subtraction,
    residual,
    residual_lanes,
    sum_of_lanes,
    target_lanes,
    target_probability,
)
from sequoia_vllm.kernels.tree_shapes import shape_row

_SAMPLED = tl.constexpr(draft_modes.SAMPLED)
_SKIP = tl.constexpr(draft_modes.SKIP)


# A batch is verified in chunks, so most tensors begin anywhere in a larger one. Trees differ in
# shape. Neither needs another compiled version.
@triton.jit(
    do_not_specialize=[
        "has_statistics", "walks_sampled", "num_states", "branches", "children_stride",
        "stats_state_stride", "stats_inner_stride", "slot_rows", "columns", "sampled_stride",
        "path_columns", "accepted_stride",
    ],
    do_not_specialize_on_alignment=[
        "target_temperatures", "statistics", "tokens", "target_tokens", "cu_num_logits", "modes",
        "positions", "seeds", "children", "inner_index", "draft_stats", "state_rows",
        "draft_temperatures", "slots", "sampled_tokens", "num_sampled", "accepted",
    ],
)  # fmt: skip
def verify_kernel(
    logits, target_temperatures, statistics, has_statistics, walks_sampled,
    tokens, target_tokens, cu_num_logits, modes, positions, seeds, children,
    inner_index, draft_logits, draft_stats, state_rows, draft_temperatures, slots,
    sampled_tokens, num_sampled, accepted,
    vocabulary, num_states, logits_stride, branches, children_stride,
    draft_state_stride, draft_inner_stride, stats_state_stride, stats_inner_stride,
    slot_rows, columns, sampled_stride, path_columns, accepted_stride,
    LANES: tl.constexpr, STEPS: tl.constexpr, BRANCHES: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One request per program. Arguments as in `verify_trees`.

    ``statistics`` are `target_statistics`; not read where ``has_statistics`` is 0. Where
    ``walks_sampled`` is 0, requests in mode SAMPLED are as without rows. These are not
    constants: an engine's batches have one version.
    """
    request = tl.program_id(0).to(tl.int64)
    first_row = tl.load(cu_num_logits + request).to(tl.int64)
    num_nodes = (tl.load(cu_num_logits + request + 1) - first_row).to(tl.int32)
    mode = tl.load(modes + request)
    if mode == _SKIP:
        num_nodes = tl.minimum(num_nodes, 1)
    if (mode == _SAMPLED) & (walks_sampled == 0):
        num_nodes = num_nodes * 0
    position = tl.load(positions + request)
    seed = tl.load(seeds + request)
    target_temperature = tl.load(target_temperatures + request)
    temperature = tl.load(draft_temperatures + request)
    # Without drafts the row may hold anything: it decides nothing.
    state = tl.load(state_rows + request).to(tl.int64)
    state = tl.minimum(tl.maximum(state, 0), num_states - 1)
    sampled_row = sampled_tokens + request * sampled_stride
    accepted_row = accepted + request * accepted_stride
    root = shape_row(slots, request, slot_rows)

    node = tl.minimum(num_nodes, 1) - 1  # the root, or -1: no node at all
    depth = tl.zeros_like(node)
    while node >= 0:
        node_children = children + (root + node) * children_stride
        if mode == _SAMPLED:
            inner = tl.maximum(tl.load(inner_index + root + node), 0).to(tl.int64)
            child, token = _sample_step(
                logits + (first_row + node) * logits_stride, target_temperature,
                statistics, has_statistics, first_row + node,
                draft_logits + state * draft_state_stride + inner * draft_inner_stride,
                draft_stats + state * stats_state_stride + inner * stats_inner_stride,
                tokens + first_row, node_children, branches, num_nodes, node, position + depth,
                seed, temperature, vocabulary, LANES, STEPS, BLOCKS, STAGES,
            )  # fmt: skip
        else:
            child, token = _match_step(
                target_tokens + first_row + node, tokens + first_row, node_children, branches,
                num_nodes, BRANCHES,
            )  # fmt: skip
        tl.store(sampled_row + depth, token)
        if child >= 0:
            tl.store(accepted_row + depth, child)
        depth += 1
        node = child

    tl.store(num_sampled + request, depth)
    column = tl.arange(0, COLUMNS)
    unused = (column >= depth) & (column < columns)
    tl.store(sampled_row + column, column.to(tl.int64) * 0 - 1, mask=unused)
    unused = (column >= depth - 1) & (column < path_columns)
    tl.store(accepted_row + column, column * 0 - 1, mask=unused)


@triton.jit
def _match_step(
    target_token, tokens, children, branches, num_nodes, BRANCHES: tl.constexpr
):  # fmt: skip
    """The first child that carries the target's token (-1: none), and that token."""
    rank = tl.arange(0, BRANCHES)
    child = tl.load(children + rank, mask=rank < branches, other=-1)
    exists = (child >= 0) & (child < num_nodes)
    drafted = tl.load(tokens + child, mask=exists, other=-1).to(tl.int64)
    token = tl.load(target_token).to(tl.int64)
    matching = exists & (drafted >= 0) & (drafted == token)
    first = tl.min(tl.where(matching, rank, BRANCHES), axis=0)
    return tl.max(tl.where(rank == first, child, -1), axis=0), token


@triton.jit
def _sample_step(
    target_row, target_temperature, statistics, has_statistics, row,
    draft_row, draft_stats, tokens, children, branches, num_nodes, node, position,
    seed, temperature, vocabulary, LANES: tl.constexpr, STEPS: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Algorithm 2 at one node: the accepted child (-1: none), and the emitted token."""
    # Temperature: a product with this, of a difference of logits.
    inverse = tl.div_rn(1.0, target_temperature)
    has_weights = has_statistics == 0
    weights = tl.zeros([LANES], tl.float32)
    if has_weights:
        weights, target_maximum = target_lanes(target_row, inverse, vocabulary, LANES, STAGES)
        target_total = sum_of_lanes(weights)
    else:
        target_maximum, target_total = merge_statistics(
            statistics, row, inverse, vocabulary, BLOCKS
        )
    target_scale = (1.0 / target_total).to(tl.float32)
    draft_maximum, draft_total = tl.load(draft_stats), tl.load(draft_stats + 1)
    lane = tl.arange(0, LANES)
    rejected = tl.zeros([LANES], tl.int64)
    a, k = 0.0, 0.0
    target_mass = tl.full([], 1.0, tl.float64)  # c
    # s; a row with no sum has no Q at all (see `draft_probability`): exhausted at once.
    draft_mass = tl.where(draft_total > 0, target_mass, 0.0)
    accepted, emitted = node * 0 - 1, tl.full([], -1, tl.int64)

    rank = 0
    while rank < branches:
        child = tl.load(children + rank)
        exists = (child >= 0) & (child < num_nodes)
        token = tl.load(tokens + tl.where(exists, child, 0)).to(tl.int64)
        if exists & (token >= 0):
            p = target_probability(
                tl.load(target_row + token), inverse, target_maximum, target_scale
            )
            q = draft_probability(
                tl.load(draft_row + token), temperature, draft_maximum, draft_total
            )
            left = residual(p, q, a, k)  # c * R[x]
            more_a, more_k = next_subtraction(target_mass, draft_mass, vocabulary - rank)
            taken = more_a * q + more_k  # c * D[x]
            uniform = uniform64(seed, 0, position + 1, child, VERIFY)
            # Without a division, and in float64: a number below 1 times D[x] stays
            # below D[x], so R[x] = D[x] > 0 always accepts.
            if uniform * taken.to(tl.float64) < left.to(tl.float64):
                accepted, emitted = child, token
            else:
                rejected |= tl.where(lane == token % LANES, 1 << (token // LANES), 0)
                weights, drafts_left = residual_lanes(
                    target_row, draft_row, inverse, target_maximum, target_scale, temperature,
                    draft_maximum, draft_total, a + more_a, k + more_k, rejected, vocabulary,
                    LANES, STAGES,
                )  # fmt: skip
                has_weights = True
                draft_mass, new_mass = sum_of_lanes(drafts_left), sum_of_lanes(weights)
                if new_mass > 0:
                    target_mass = new_mass
                    a += more_a
                    k += more_k
                elif left > 0:
                    # R and D differ by rounding alone: the acceptance probability was 1.
                    accepted, emitted = child, token
                else:
                    # R stays what it was. Summed again: this is rare, and keeping
                    # the last sums during the pass would spill registers.
                    weights, _ = residual_lanes(
                        target_row, draft_row, inverse, target_maximum, target_scale,
                        temperature, draft_maximum, draft_total, a, k, rejected, vocabulary,
                        LANES, STAGES,
                    )  # fmt: skip
            rank += 1
        else:
            rank = branches
        if accepted >= 0:
            rank = branches

    if accepted < 0:
        if not has_weights:
            weights, _ = target_lanes(target_row, inverse, vocabulary, LANES, STAGES)
        uniform = uniform64(seed, 0, position, node, RESIDUAL)
        emitted = draw_residual(
            weights, uniform, target_row, draft_row, inverse, target_maximum, target_scale,
            temperature, draft_maximum, draft_total, a, k, rejected, vocabulary, LANES, STEPS,
        )  # fmt: skip
    return accepted, emitted
