# mypy: allow-untyped-defs
"""Traversal verification on the GPU (arXiv 2505.12398), in Triton: waves of nodes.

In the plain form, `tests.oracles.verification.traversal`, nodes are visited one after another, and
each rejection costs a pass over the vocabulary. But what a rejection leaves at a node does not
depend on the subtree of the rejected child, nor on other nodes than those above. So one wave visits
children in many parts of the tree, as if nothing were accepted. Of the nodes that may be accepted,
the first in the plain form's order wins.

A launch is a wave, and its programs are (request, visit, part of the vocabulary). A wave leaves
two things for the next ones: a node's *state* before each of its children's turns, in the place
of that child, and the sums of the pass that rejects it, by parts. A visit that comes after what
earlier waves have accepted does nothing.

What is left of P and Q after rejections is in closed form, see `target_statistics`. In its terms a
rejection adds ``(c / chance) / s`` to a. With S = ``chance`` * (new c) / c, ``chance`` becomes
``S / (S + 1 - chance)``.
"""

import triton
import triton.language as tl

from sequoia_vllm.kernels import modes as draft_modes
from sequoia_vllm.kernels.children_kernels import draft_probability
from sequoia_vllm.kernels.random import RESIDUAL, VERIFY, uniform64
from sequoia_vllm.kernels.target_statistics import (
    draw_residual,
    load_draft,
    load_target,
    merge_statistics,
    next_subtraction,
    residual,
    residual_lanes,
    target_lanes,
    target_probability,
)

_SAMPLED = tl.constexpr(draft_modes.SAMPLED)
NEVER = tl.constexpr(2147483647)
"""The place in the order that stands for "not accepted"."""
NUM_STATES = tl.constexpr(6)
"""State of a child's turn, float64: chance, a, k, c, s, and its own chance (-1: no child)."""
_CHILD = tl.constexpr(5)
NODE_FIELDS = tl.constexpr(6)
"""Facts of a node, int32: parent, rank, previous sibling, depth, begin and end in the order."""
# Infinity times a Q of 0 would be NaN.
_LARGEST = tl.constexpr(3.4028234663852886e38)

_NUMBERS = [
    "num_visits", "wave", "num_nodes_launched", "nodes", "num_states", "branches",
    "children_stride", "stats_state_stride", "stats_inner_stride", "num_parts",
]  # fmt: skip
# A batch is verified in chunks, so most tensors begin anywhere in a larger one.
_ANYWHERE = [
    "target_temperatures", "statistics", "tokens", "cu_num_logits", "modes", "positions", "seeds",
    "visits", "node_table", "decided_in", "children", "inner_index", "draft_stats", "state_rows",
    "draft_temperatures", "states", "partials", "decisions",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def wave_kernel(
    logits, target_temperatures, statistics, tokens, cu_num_logits, modes, positions, seeds,
    visits, num_visits, wave, num_nodes_launched, node_table, decided_in, nodes,
    children, inner_index, draft_logits, draft_stats, state_rows, draft_temperatures,
    states, partials, decisions,
    vocabulary, num_states, logits_stride, branches, children_stride,
    draft_state_stride, draft_inner_stride, stats_state_stride, stats_inner_stride, num_parts,
    PART: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """A visit of one request, and one part of the vocabulary. Arguments as in `verify_trees`.

    ``visits``: nodes whose turn it is at their parents; or -node, all of whose children had
    theirs. ``statistics`` are `target_statistics`.
    """
    request = (tl.program_id(0) // num_visits).to(tl.int64)
    part = tl.program_id(1)
    if tl.load(modes + request) == _SAMPLED:
        visit = tl.load(visits + tl.program_id(0) % num_visits)
        node = tl.abs(visit)
        first_row = tl.load(cu_num_logits + request).to(tl.int64)
        num_nodes = (tl.load(cu_num_logits + request + 1) - first_row).to(tl.int32)
        own = node_table + node * NODE_FIELDS
        own_tokens = tokens + first_row
        own_states = states + request * nodes * NUM_STATES
        own_partials = partials + request * nodes * num_parts * 2
        own_decisions = decisions + request * 2 * nodes
        accepted = first_accepted(own_decisions, decided_in, wave, num_nodes_launched, nodes, NODES)
        depth, begin, end = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
        position = tl.load(positions + request) + depth
        uniform = uniform64(tl.load(seeds + request), 0, position, node, VERIFY)
        found = tl.full([], NEVER, tl.int32)
        if visit < 0:
            # A node all of whose children were rejected.
            last = _last_child(own_tokens, children + node * children_stride, branches, num_nodes)
            if (part == 0) & (node < num_nodes) & (last >= 0) & (end < accepted):
                chance, _, _, _, _ = _after_rejection(
                    own_states, own_partials, node_table, last, vocabulary, num_parts, PARTS
                )
                if (uniform < chance) | (chance >= 1.0):
                    found = end
        else:
            if (node < num_nodes) & (begin < accepted):
                parent, rank, previous = tl.load(own), tl.load(own + 1), tl.load(own + 2)
                inner = tl.maximum(tl.load(inner_index + parent), 0).to(tl.int64)
                state = tl.load(state_rows + request).to(tl.int64)
                state = tl.minimum(tl.maximum(state, 0), num_states - 1)
                stats = draft_stats + state * stats_state_stride + inner * stats_inner_stride
                draft_row = draft_logits + state * draft_state_stride + inner * draft_inner_stride
                draft_maximum, draft_total = tl.load(stats), tl.load(stats + 1)
                target_row = logits + (first_row + parent) * logits_stride
                inverse = tl.div_rn(1.0, tl.load(target_temperatures + request))
                temperature = tl.load(draft_temperatures + request)
                maximum, total = merge_statistics(
                    statistics, first_row + parent, inverse, vocabulary, BLOCKS
                )
                scale = (1.0 / total).to(tl.float32)

                chance, a, k, c, s, is_there = _before_turn(
                    own_states, own_partials, node_table, parent, previous, draft_total,
                    vocabulary, num_parts, PARTS,
                )  # fmt: skip
                token = tl.load(own_tokens + node).to(tl.int64)
                is_there = is_there & (token >= 0)
                known = tl.maximum(token, 0)
                p = target_probability(tl.load(target_row + known), inverse, maximum, scale)
                q = draft_probability(
                    tl.load(draft_row + known), temperature, draft_maximum, draft_total
                )
                child_chance = _chance_of_child(
                    residual(p, q, a.to(tl.float32), k.to(tl.float32)), q, chance, c, s,
                    vocabulary - rank,
                )  # fmt: skip
                child_chance = tl.where(is_there, child_chance, -1.0)
                chance = tl.where(is_there, chance, 0.0)
                if part == 0:
                    own_state = own_states + node * NUM_STATES
                    tl.store(own_state, chance)
                    tl.store(own_state + 1, a)
                    tl.store(own_state + 2, k)
                    tl.store(own_state + 3, c)
                    tl.store(own_state + 4, s)
                    tl.store(own_state + _CHILD, child_chance)
                    below = _last_child(
                        own_tokens, children + node * children_stride, branches, num_nodes
                    )
                    if (below < 0) & ((uniform < child_chance) | (child_chance >= 1.0)):
                        found = end  # a leaf
                if (chance > 0) & (end + 1 < accepted):
                    a, k = _subtracted(a, k, chance, c, s, vocabulary - rank)
                    left, drafts = _sums_of_part(
                        target_row, draft_row, inverse, maximum, scale, temperature,
                        draft_maximum, draft_total, a.to(tl.float32), k.to(tl.float32),
                        own_tokens, children + parent * children_stride, rank, part, vocabulary,
                        PART,
                    )  # fmt: skip
                    left = tl.where(scale == scale, left, scale)  # NaN if the row is
                    own_part = own_partials + (node * num_parts + part) * 2
                    tl.store(own_part, left)
                    tl.store(own_part + 1, drafts)
        if part == 0:
            tl.store(own_decisions + tl.where(visit < 0, nodes, 0) + node, found)


@triton.jit(
    do_not_specialize=[*_NUMBERS, "columns", "sampled_stride", "path_columns", "accepted_stride"],
    do_not_specialize_on_alignment=[*_ANYWHERE, "sampled_tokens", "num_sampled", "accepted"],
)
def path_kernel(
    logits, target_temperatures, statistics, tokens, cu_num_logits, modes, positions, seeds,
    wave, num_nodes_launched, node_table, decided_in, nodes,
    children, inner_index, draft_logits, draft_stats, state_rows, draft_temperatures,
    states, partials, decisions, sampled_tokens, num_sampled, accepted,
    vocabulary, num_states, logits_stride, branches, children_stride,
    draft_state_stride, draft_inner_stride, stats_state_stride, stats_inner_stride, num_parts,
    columns, sampled_stride, path_columns, accepted_stride,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, NODES: tl.constexpr, LANES: tl.constexpr,
    STEPS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes the accepted path of one request, and draws the token after it.

    Arguments as in `wave_kernel` and `verify_trees`; ``wave`` is their number.
    """
    request = tl.program_id(0).to(tl.int64)
    first_row = tl.load(cu_num_logits + request).to(tl.int64)
    num_nodes = (tl.load(cu_num_logits + request + 1) - first_row).to(tl.int32)
    is_sampled = tl.load(modes + request) == _SAMPLED
    sampled_row = sampled_tokens + request * sampled_stride
    accepted_row = accepted + request * accepted_stride
    column = tl.arange(0, COLUMNS)
    if is_sampled:
        tl.store(sampled_row + column, column.to(tl.int64) * 0 - 1, mask=column < columns)
        tl.store(accepted_row + column, column * 0 - 1, mask=column < path_columns)
    if is_sampled & (num_nodes <= 0):
        tl.store(num_sampled + request, 0)
    if is_sampled & (num_nodes > 0):
        own_tokens = tokens + first_row
        found = first_accepted(
            decisions + request * 2 * nodes, decided_in, wave, num_nodes_launched, nodes, NODES
        )
        # A node's end is its own: the one that has this end; the root's chance is always 1.
        index = tl.arange(0, NODES)
        ends = tl.load(node_table + index * NODE_FIELDS + 5, mask=index < nodes, other=-1)
        node = tl.max(tl.where(ends == found, index, 0), axis=0)
        depth = tl.load(node_table + node * NODE_FIELDS + 3)

        node_children = children + node * children_stride
        last = _last_child(own_tokens, node_children, branches, num_nodes)
        inner = tl.maximum(tl.load(inner_index + node), 0).to(tl.int64)
        state = tl.load(state_rows + request).to(tl.int64)
        state = tl.minimum(tl.maximum(state, 0), num_states - 1)
        stats = draft_stats + state * stats_state_stride + inner * stats_inner_stride
        draft_row = draft_logits + state * draft_state_stride + inner * draft_inner_stride
        target_row = logits + (first_row + node) * logits_stride
        inverse = tl.div_rn(1.0, tl.load(target_temperatures + request))
        temperature = tl.load(draft_temperatures + request)
        lane = tl.arange(0, LANES)
        rejected = tl.zeros([LANES], tl.int64)
        a, k = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        draft_maximum, draft_total = 0.0 * temperature, 0.0 * temperature + 1.0
        maximum, total = merge_statistics(statistics, first_row + node, inverse, vocabulary, BLOCKS)
        scale = (1.0 / total).to(tl.float32)
        weights = tl.zeros([LANES], tl.float32)
        if last < 0:
            weights, _unused_maximum = target_lanes(target_row, inverse, vocabulary, LANES, STAGES)
        else:
            _unused_chance, wide_a, wide_k, _unused_c, _unused_s = _after_rejection(
                states + request * nodes * NUM_STATES, partials + request * nodes * num_parts * 2,
                node_table, last, vocabulary, num_parts, PARTS,
            )  # fmt: skip
            a, k = wide_a.to(tl.float32), wide_k.to(tl.float32)
            for rank in range(tl.load(node_table + last * NODE_FIELDS + 1) + 1):
                token = tl.load(own_tokens + tl.load(node_children + rank)).to(tl.int64)
                rejected |= tl.where(lane == token % LANES, 1 << (token // LANES), 0)
            draft_maximum, draft_total = tl.load(stats), tl.load(stats + 1)
            weights, _unused_drafts = residual_lanes(
                target_row, draft_row, inverse, maximum, scale, temperature, draft_maximum,
                draft_total, a, k, rejected, vocabulary, LANES, STAGES,
            )  # fmt: skip
        position = tl.load(positions + request) + depth
        uniform = uniform64(tl.load(seeds + request), 0, position, node, RESIDUAL)
        token = draw_residual(
            weights, uniform, target_row, draft_row, inverse, maximum, scale, temperature,
            draft_maximum, draft_total, a, k, rejected, vocabulary, LANES, STEPS,
        )  # fmt: skip

        tl.store(sampled_row + depth, token)
        tl.store(num_sampled + request, depth + 1)
        while depth > 0:
            depth -= 1
            tl.store(sampled_row + depth, tl.load(own_tokens + node).to(tl.int64))
            tl.store(accepted_row + depth, node)
            node = tl.load(node_table + node * NODE_FIELDS)


@triton.jit
def first_accepted(decisions, decided_in, wave, launched, nodes, NODES: tl.constexpr):
    """First node in the order that may be accepted, of all that were decided before this wave."""
    index = tl.arange(0, NODES)
    found = tl.full([NODES], NEVER, tl.int32)
    for closing in range(2):
        place = closing * nodes + index
        exists = index < tl.minimum(nodes, launched)
        known = tl.load(decided_in + place, mask=exists, other=NEVER) < wave
        found = tl.minimum(found, tl.load(decisions + place, mask=known, other=NEVER))
    return tl.min(found, axis=0)


@triton.jit
def _last_child(tokens, children, branches, num_nodes):
    """The last child that was drafted: before the first placeholder; -1: none."""
    last = tl.full([], -1, tl.int32)
    rank = tl.full([], 0, tl.int32)
    while rank < branches:
        child = tl.load(children + rank)
        exists = (child >= 0) & (child < num_nodes)
        if exists & (tl.load(tokens + child, mask=exists, other=-1) >= 0):
            last = child
            rank += 1
        else:
            rank = branches
    return last


@triton.jit
def _before_turn(
    states, partials, node_table, parent, previous, draft_total, vocabulary, num_parts,
    PARTS: tl.constexpr,
):  # fmt: skip
    """State of the parent at a child's turn: chance, a, k, c, s; and whether a child can follow."""
    one = tl.full([], 1.0, tl.float64)
    chance, a, k, c = one, one - 1.0, one - 1.0, one
    # A row with no sum has no Q at all (see `draft_probability`): exhausted at once.
    s = tl.where(draft_total > 0, one, one - 1.0)
    is_there = previous >= -1
    if previous >= 0:
        is_there = tl.load(states + previous * NUM_STATES + _CHILD) >= 0
        chance, a, k, c, s = _after_rejection(
            states, partials, node_table, previous, vocabulary, num_parts, PARTS
        )
    elif parent > 0:
        chance = tl.maximum(tl.load(states + parent * NUM_STATES + _CHILD), 0.0)
    return chance, a, k, c, s, is_there


@triton.jit
def _after_rejection(
    states, partials, node_table, child, vocabulary, num_parts, PARTS: tl.constexpr
):
    """State of the parent after this child's rejection: chance, a, k, c, s."""
    own = states + child * NUM_STATES
    chance, a, k = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    c, s = tl.load(own + 3), tl.load(own + 4)
    # A path that is impossible had no pass.
    if chance > 0:
        part = tl.arange(0, PARTS)
        sums = partials + (child * num_parts + part) * 2
        left = tl.load(sums, mask=part < num_parts, other=0.0)
        drafts = tl.load(sums + 1, mask=part < num_parts, other=0.0)
        left = tl.sum(left.to(tl.float64), axis=0)
        if left > 0:
            rank = tl.load(node_table + child * NODE_FIELDS + 1)
            a, k = _subtracted(a, k, chance, c, s, vocabulary - rank)
            mass = chance * left / c
            c = left
            # 1 - chance first: a certain path stays certain to the bit.
            chance = mass / (mass + (1.0 - chance))
        else:
            # Impossible from here on; or still certain, except for rounding. A row of NaN keeps
            # its chance, and accepts no child.
            chance = tl.where((chance < 1.0) & (left == left), 0.0, chance)
        s = tl.sum(drafts.to(tl.float64), axis=0)
    return chance, a, k, c, s


@triton.jit
def _subtracted(a, k, chance, c, s, tokens_left):
    """a and k with another rejection; float64, of values that float32 has."""
    more_a, more_k = next_subtraction(c / chance, s, tokens_left)
    a = tl.minimum(a.to(tl.float32) + more_a, _LARGEST)
    k = tl.minimum(k.to(tl.float32) + more_k, _LARGEST)
    return a.to(tl.float64), k.to(tl.float64)


@triton.jit
def _chance_of_child(left, q, chance, c, s, tokens_left):
    """Chance of the child's path: min(chance * M / D, 1), from c * M and Q of its token."""
    wanted = chance * left.to(tl.float64) / c
    exhausted = s == 0
    drawn = q.to(tl.float64) / tl.where(exhausted, 1.0, s)
    drawn = tl.where(exhausted, 1.0 / tl.maximum(tokens_left, 1).to(tl.float64), drawn)
    ratio = tl.minimum(wanted / tl.where(drawn > 0, drawn, 1.0), 1.0)
    # A child that Q cannot have drawn is certain, unless it is impossible.
    return tl.where(drawn > 0, ratio, tl.where(wanted > 0, 1.0, 0.0))


@triton.jit
def _sums_of_part(
    target_row, draft_row, inverse, maximum, scale, temperature, draft_maximum, draft_total, a, k,
    tokens, siblings, rank, part, vocabulary, PART: tl.constexpr,
):  # fmt: skip
    """Sums of (P - a*Q - k)+ and of Q, without the tokens of the siblings up to this rank."""
    token = part * PART + tl.arange(0, PART)
    kept = token < vocabulary
    for earlier in range(rank + 1):
        kept = kept & (token != tl.load(tokens + tl.load(siblings + earlier)))
    p = load_target(target_row, token, kept, inverse, maximum, scale)
    q = load_draft(draft_row, token, kept, temperature, draft_maximum, draft_total)
    return tl.sum(residual(p, q, a, k), axis=0), tl.sum(q, axis=0)
