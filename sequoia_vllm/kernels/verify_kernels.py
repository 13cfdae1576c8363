# mypy: allow-untyped-defs
"""Verification of token trees on the GPU: Algorithm 2 of arXiv 2402.12374, in Triton.

One program walks the tree of one request, and nothing waits for the host. It looks
at the vocabulary once per visited node, and once more per rejected child; no
distribution is written to memory. Where the rows' statistics are given, the first
look is taken only where a walk ends without a rejected child: at most once.

**Residuals in closed form.** R starts as P, D as Q. After j rejected children

    R = (P - a*Q - k)+ / c   and   D = Q / s   on the tokens not rejected,

where c is the sum of the numerator, s what Q has left there, and a = k = 0,
c = s = 1 at first. Rejecting another child takes R - D, which adds c/s to a:
``(P - a*Q - k)+ - (c/s)*Q`` has the same positive part as ``P - (a + c/s)*Q - k``.
Once s is exactly 0, D is uniform over the m tokens not rejected; Q is 0 on all of
them, and c/m is added to k instead. Rejected tokens have R = 0, by D > R there or
D = R = 0. So two numbers and the rejected tokens say all about R.

**Lanes.** Token x belongs to lane ``x % LANES``. Sums go by lanes first, so that
rounding grows with V / LANES, and sampling by inversion needs no pass of its own:
the lanes' sums of the last pass give the lane, and its up to 64 tokens are computed
again. A race of exponentials would need a Philox call per token, which costs several
passes. Which lane's tokens were rejected is one word of 64 bits.

Rounding moves the emitted law by some 1e-6: a residual whose small c makes its
rounding large is reached with probability c.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sequoia_vllm.kernels import modes as draft_modes
from sequoia_vllm.kernels.children_kernels import draft_probability
from sequoia_vllm.kernels.random import RESIDUAL, VERIFY, uniform64
from sequoia_vllm.kernels.target_statistics import LOWEST, merge_statistics

_SAMPLED = tl.constexpr(draft_modes.SAMPLED)
_SKIP = tl.constexpr(draft_modes.SKIP)


# A batch is verified in chunks, so most tensors begin anywhere in a larger one; and
# trees differ in shape. Neither is anything to compile another version for.
@triton.jit(
    do_not_specialize=[
        "has_statistics", "num_states", "branches", "children_stride", "stats_state_stride",
        "stats_inner_stride", "columns", "sampled_stride", "path_columns", "accepted_stride",
    ],
    do_not_specialize_on_alignment=[
        "target_temperatures", "statistics", "tokens", "target_tokens", "cu_num_logits", "modes",
        "positions", "seeds", "children", "inner_index", "draft_stats", "state_rows",
        "draft_temperatures", "sampled_tokens", "num_sampled", "accepted",
    ],
)  # fmt: skip
def verify_kernel(
    logits, target_temperatures, statistics, has_statistics,
    tokens, target_tokens, cu_num_logits, modes, positions, seeds, children,
    inner_index, draft_logits, draft_stats, state_rows, draft_temperatures,
    sampled_tokens, num_sampled, accepted,
    vocabulary, num_states, logits_stride, branches, children_stride,
    draft_state_stride, draft_inner_stride, stats_state_stride, stats_inner_stride,
    columns, sampled_stride, path_columns, accepted_stride,
    LANES: tl.constexpr, STEPS: tl.constexpr, BRANCHES: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One request per program. Arguments as in `verify_trees`.

    ``statistics`` are `target_statistics`; not read where ``has_statistics`` is 0. Not a
    constant: an engine's small and large batches have one version.
    """
    request = tl.program_id(0).to(tl.int64)
    first_row = tl.load(cu_num_logits + request).to(tl.int64)
    num_nodes = (tl.load(cu_num_logits + request + 1) - first_row).to(tl.int32)
    mode = tl.load(modes + request)
    if mode == _SKIP:
        num_nodes = tl.minimum(num_nodes, 1)
    position = tl.load(positions + request)
    seed = tl.load(seeds + request)
    target_temperature = tl.load(target_temperatures + request)
    temperature = tl.load(draft_temperatures + request)
    # Without drafts the row may be anything, and none of it decides anything.
    state = tl.load(state_rows + request).to(tl.int64)
    state = tl.minimum(tl.maximum(state, 0), num_states - 1)
    sampled_row = sampled_tokens + request * sampled_stride
    accepted_row = accepted + request * accepted_stride

    node = tl.minimum(num_nodes, 1) - 1  # the root, or -1: no node at all
    depth = tl.zeros_like(node)
    while node >= 0:
        node_children = children + node * children_stride
        if mode == _SAMPLED:
            inner = tl.maximum(tl.load(inner_index + node), 0).to(tl.int64)
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
        weights, target_maximum = _target_lanes(target_row, inverse, vocabulary, LANES, STAGES)
        target_total = _sum(weights)
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
            p = _target_probability(
                tl.load(target_row + token), inverse, target_maximum, target_scale
            )
            q = draft_probability(
                tl.load(draft_row + token), temperature, draft_maximum, draft_total
            )
            left = _residual(p, q, a, k)  # c * R[x]
            more_a, more_k = _next_subtraction(target_mass, draft_mass, vocabulary - rank)
            taken = more_a * q + more_k  # c * D[x]
            uniform = uniform64(seed, 0, position + 1, child, VERIFY)
            # Without a division, and in float64: a number below 1 times D[x] stays
            # below D[x], so R[x] = D[x] > 0 always accepts.
            if uniform * taken.to(tl.float64) < left.to(tl.float64):
                accepted, emitted = child, token
            else:
                rejected |= tl.where(lane == token % LANES, 1 << (token // LANES), 0)
                weights, drafts_left = _residual_lanes(
                    target_row, draft_row, inverse, target_maximum, target_scale, temperature,
                    draft_maximum, draft_total, a + more_a, k + more_k, rejected, vocabulary,
                    LANES, STAGES,
                )  # fmt: skip
                has_weights = True
                draft_mass, new_mass = _sum(drafts_left), _sum(weights)
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
                    weights, _ = _residual_lanes(
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
            weights, _ = _target_lanes(target_row, inverse, vocabulary, LANES, STAGES)
        uniform = uniform64(seed, 0, position, node, RESIDUAL)
        chosen, uniform = _invert(weights, uniform, LANES)
        step = tl.arange(0, STEPS)
        lane_token = chosen + step * LANES
        bits = tl.sum(tl.where(lane == chosen, rejected, 0), axis=0)
        kept = (lane_token < vocabulary) & (((bits >> step.to(tl.int64)) & 1) == 0)
        p = _load_target(target_row, lane_token, kept, inverse, target_maximum, target_scale)
        # At a leaf there is no Q, and nowhere is it needed while a is 0.
        drafted = kept & (lane_token.to(tl.float32) * 0.0 + a > 0)
        q = _load_draft(draft_row, lane_token, drafted, temperature, draft_maximum, draft_total)
        chosen_step, _ = _invert(_residual(p, q, a, k), uniform, STEPS)
        emitted = (chosen + chosen_step * LANES).to(tl.int64)
    return accepted, emitted


@triton.jit
def _target_lanes(target_row, inverse, vocabulary, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Sums of exp((logit - maximum) * inverse) by lanes, and the row's maximum."""
    lane = tl.arange(0, LANES)
    # From the lowest finite number instead of -inf, which minus itself is NaN.
    maximum = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, vocabulary, LANES, num_stages=STAGES):
        token = start + lane
        logit = tl.load(target_row + token, mask=token < vocabulary, other=float("-inf"))
        logit = logit.to(tl.float32)
        # One exponential does: of the larger of the two it is exp(0).
        decay = tl.exp(-tl.abs(logit - maximum) * inverse)
        total = tl.where(logit > maximum, total * decay + 1.0, total + decay)
        maximum = tl.maximum(logit, maximum)
    row_maximum = tl.max(maximum, axis=0)
    return total * tl.exp((maximum - row_maximum) * inverse), row_maximum


@triton.jit
def _residual_lanes(
    target_row, draft_row, inverse, target_maximum, target_scale, temperature, draft_maximum,
    draft_total, a, k, rejected, vocabulary, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums by lanes of (P - a*Q - k)+ and of Q, over the tokens not rejected."""
    lane = tl.arange(0, LANES)
    weights = tl.zeros([LANES], tl.float32)
    drafts = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, vocabulary, LANES, num_stages=STAGES):
        token = start + lane
        kept = (token < vocabulary) & (((rejected >> (start // LANES)) & 1) == 0)
        p = _load_target(target_row, token, kept, inverse, target_maximum, target_scale)
        q = _load_draft(draft_row, token, kept, temperature, draft_maximum, draft_total)
        weights += _residual(p, q, a, k)
        drafts += q
    return weights, drafts


@triton.jit
def _load_target(target_row, token, mask, inverse, maximum, scale):
    logit = tl.load(target_row + token, mask=mask, other=float("-inf"))
    return _target_probability(logit, inverse, maximum, scale)


@triton.jit
def _load_draft(draft_row, token, mask, temperature, maximum, total):
    logit = tl.load(draft_row + token, mask=mask, other=0.0)
    return tl.where(mask, draft_probability(logit, temperature, maximum, total), 0.0)


@triton.jit
def _target_probability(logit, inverse, maximum, scale):
    """P. One expression for all who ask, so that they agree to the bit.

    The difference first: rounding it is nothing beside rounding a logit that a low
    temperature has made large.
    """
    return tl.exp((logit.to(tl.float32) - maximum) * inverse) * scale


@triton.jit
def _residual(p, q, a, k):
    """c * R: what rejections have left of P."""
    return tl.maximum(p - a * q - k, 0.0)


@triton.jit
def _next_subtraction(target_mass, draft_mass, tokens_left):
    """What another rejection adds to a and to k: c/s and 0; 0 and c/m once Q is exhausted."""
    exhausted = draft_mass == 0
    more_a = target_mass / tl.where(exhausted, 1.0, draft_mass)
    more_k = target_mass / tl.maximum(tokens_left, 1)
    return (
        tl.where(exhausted, 0.0, more_a).to(tl.float32),
        tl.where(exhausted, more_k, 0.0).to(tl.float32),
    )


@triton.jit
def _sum(lanes):
    """In float64: there are as many terms here as a lane has at most, and many more."""
    return tl.sum(lanes.to(tl.float64), axis=0)


@triton.jit
def _invert(weights, uniform, SIZE: tl.constexpr):
    """An index with the probability of its weight, and a uniform that is left to use.

    Args:
        weights: float32 ``[SIZE]``.
        uniform: float64 in [0, 1].
        SIZE: A power of two.
    """
    index = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weights.to(tl.float64), axis=0)
    threshold = uniform * tl.max(cumulative, axis=0)
    possible = weights > 0
    chosen = tl.min(tl.where(possible & (cumulative > threshold), index, SIZE), axis=0)
    # Rounding may leave none above: then the last that is possible at all.
    chosen = tl.minimum(chosen, tl.max(tl.where(possible, index, 0), axis=0))
    weight = tl.sum(tl.where(index == chosen, weights, 0.0), axis=0).to(tl.float64)
    above = tl.sum(tl.where(index == chosen, cumulative, 0.0), axis=0) - threshold
    return chosen, tl.minimum(tl.maximum(1.0 - above / weight, 0.0), 1.0)
