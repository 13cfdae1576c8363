# mypy: allow-untyped-defs
"""Trees over layers of Kimi Delta Attention, whose decay differs in each channel of a key.

Along a path a head's state S takes a token with key k (of length 1), value v, decays a = e^g, one
for each channel, and strength b as S' = S Diag(a) (I - b k k^T) + b v k^T. With D(i, j) the sum of
g of the tokens behind node j on the path to node i, and D(i) that of all tokens on it,

    u_i = b_i (v_i - S0 (e^{D(i)} k_i) - sum over j before i of (k_i . e^{D(i, j)} k_j) u_j)
    S_i = S0 Diag(e^{D(i)}) + sum over j of u_j (e^{D(i, j)} k_j)^T

where j runs over node i's ancestors, in S_i over node i, too. Here e^{D(i, j)} is no product of two
factors that float32 has: e^{-D(j)} may be larger than all its numbers. So `relate_nodes_kernel`
takes each pair's sum as it is, from which all exponentials are at most 1. It walks up the path, and
adds. Then `score_kda_kernel` solves for u.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.recurrent_heads import softplus, sum_of_seen
from sequoia_vllm.kernels.recurrent_tree import KeptNodes, ScoredNodes, score_heads
from sequoia_vllm.kernels.recurrent_tree_kernels import dot, rows_and_state
from sequoia_vllm.kernels.tree_shapes import rows_per_slot, shape_row
from sequoia_vllm.tree import MOST_RECURRENT_NODES

ROWS_AT_ONCE = 16
"""Nodes that one program relates to their ancestors."""
_MOST = tl.constexpr(MOST_RECURRENT_NODES)


def score_kda(
    convolved: Tensor,
    gates: Tensor,
    strengths: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    *,
    nodes: ScoredNodes,
    kept: KeptNodes,
    layer: int,
    **shared: Any,
) -> None:
    """Computes all nodes' outputs from the states before their trees, which stay as they are.

    Args:
        convolved: ``[T, C]``, contiguous: queries, keys, values.
        gates: ``[T, H, K]``, contiguous in its rows: g is ``-exp(log_a) * softplus(gate +
            dt_bias)``, or with a bound ``lower_bound * sigmoid(exp(log_a) * (gate + dt_bias))``.
        strengths: ``[T, H]``, contiguous in its rows: b is its sigmoid.
        log_a: ``[H]``.
        dt_bias: ``[H * K]``.
        lower_bound: Of g; None: there is none.
        nodes, kept, layer, shared: See `score_heads`, also for errors.
    """
    shape = kept.shape
    assert shape is not None
    most = nodes.ancestors.shape[-1]
    if (requests := len(nodes.state_indices)) > 0 and most <= MOST_RECURRENT_NODES:
        relate_nodes_kernel[(requests, shape.heads, triton.cdiv(most, ROWS_AT_ONCE))](
            convolved, gates, gates.stride(0), log_a, dt_bias, lower_bound or 0.0,
            shape.key**-0.5, nodes.state_indices, nodes.cu_nodes, nodes.slots, nodes.ancestors,
            rows_per_slot(nodes.ancestors, 2), most, kept.keys[layer], kept.decays[layer],
            kept.related, HEADS=shape.heads, KEY=shape.key, VALUES=shape.value_heads * shape.value,
            HAS_BOUND=lower_bound is not None, ROWS=ROWS_AT_ONCE, num_warps=4,
        )  # fmt: skip
    inputs = convolved, strengths, strengths.stride(0), nodes.depth, kept.related
    score_heads(score_kda_kernel, *inputs, nodes=nodes, kept=kept, layer=layer, **shared)


def score_kda_by_decays(
    convolved: Tensor, decays: Tensor, strengths: Tensor, lower_bound: float | None, **more: Any
) -> None:
    """Calls `score_kda` where decays and strengths were computed before.

    Args:
        convolved, lower_bound, more: See `score_kda`.
        decays: float32 ``[T, H, K]``: g.
        strengths: float32 ``[T, H]``: b.
    """
    if lower_bound is None:
        gates = (-decays.expm1()).log() - decays  # softplus makes -g of it
    else:
        gates = (decays / lower_bound).logit()
    none = decays.new_zeros(decays[0].numel())
    of_heads = none[: decays.shape[1]], none, lower_bound
    score_kda(convolved, gates, strengths.logit(), *of_heads, **more)


@triton.jit
def _log_decays(gates, bias, rate, lower_bound, HAS_BOUND: tl.constexpr):
    """The form of vLLM's decoding kernel."""
    gates = gates.to(tl.float32) + bias
    return lower_bound * tl.sigmoid(rate * gates) if HAS_BOUND else -rate * softplus(gates)


@triton.jit(
    do_not_specialize=["gate_stride", "lower_bound", "slot_rows", "max_nodes"],
    do_not_specialize_on_alignment=["gates", "state_indices", "cu_nodes", "slots"],
)
def relate_nodes_kernel(
    convolved, gates, gate_stride, log_a, dt_bias, lower_bound, scale, state_indices, cu_nodes,
    slots, ancestors, slot_rows, max_nodes, keys, decays, related,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUES: tl.constexpr, HAS_BOUND: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Some nodes of one request in one head: what the solver needs of each, and g and k.

    Of node i these are e^{D(i)} k_i and e^{D(i)} q_i, and for each j that it sees the products of
    e^{D(i, j)} k_j with k_i and q_i.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    node = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, KEY)
    first, num_nodes, _ = rows_and_state(cu_nodes, state_indices, request)
    exists = node < num_nodes
    mask = exists[:, None]
    row = first + node
    width: tl.constexpr = 2 * HEADS * KEY + VALUES

    at = head * KEY + feature
    bias = tl.load(dt_bias + at).to(tl.float32)
    rate = tl.exp(tl.load(log_a + head).to(tl.float32))
    at_keys = convolved + HEADS * KEY + at
    at_queries = convolved + row[:, None] * width + at[None, :]
    query = tl.load(at_queries, mask=mask, other=0.0).to(tl.float32)
    query *= scale / tl.sqrt(tl.sum(query * query, axis=1) + 1e-6)[:, None]
    own = tl.load(at_queries + HEADS * KEY, mask=mask, other=0.0).to(tl.float32)
    own *= 1.0 / tl.sqrt(tl.sum(own * own, axis=1) + 1e-6)[:, None]
    at_gates = gates + row[:, None] * gate_stride + at[None, :]
    own_gates = tl.load(at_gates, mask=mask, other=0.0)
    at_kept = row[:, None] * (HEADS * KEY) + at[None, :]
    tl.store(keys + at_kept, own, mask=mask)
    own_decays = _log_decays(own_gates, bias[None, :], rate, lower_bound, HAS_BOUND)
    tl.store(decays + at_kept, own_decays, mask=mask)

    seen_at = ancestors + (shape_row(slots, request, slot_rows) + node) * max_nodes
    related += (row * HEADS + head) * (2 * KEY + 2 * _MOST)
    behind = tl.zeros([ROWS, KEY], dtype=tl.float32)
    end = tl.minimum(num_nodes, (tl.program_id(2) + 1) * ROWS)
    for back in range(end):
        other = end - 1 - back
        key = tl.load(at_keys + (first + other) * width).to(tl.float32)
        key *= 1.0 / tl.sqrt(tl.sum(key * key) + 1e-6)
        gate = tl.load(gates + (first + other) * gate_stride + at)
        sees = tl.load(seen_at + other, mask=exists, other=0) != 0
        left = tl.exp(behind) * key[None, :]
        tl.store(related + 2 * KEY + other, tl.sum(own * left, axis=1), mask=sees)
        tl.store(related + 2 * KEY + _MOST + other, tl.sum(query * left, axis=1), mask=sees)
        more = _log_decays(gate, bias, rate, lower_bound, HAS_BOUND)
        behind += tl.where(sees[:, None], more[None, :], 0.0)
    left = tl.exp(behind)
    at_own = related[:, None] + feature[None, :]
    tl.store(at_own, own * left, mask=mask)
    tl.store(at_own + KEY, query * left, mask=mask)


@triton.jit(
    do_not_specialize=["strength_stride", "depth", "slot_rows", "max_nodes"],
    do_not_specialize_on_alignment=["strengths", "state_indices", "cu_nodes", "slots"],
)
def score_kda_kernel(
    convolved, strengths, strength_stride, depth, related, states, block_stride, state_indices,
    cu_nodes, slots, ancestors, slot_rows, max_nodes, keys, updates, decays, output,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PART: tl.constexpr, NODES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """All nodes of one request, in one head and a part of its values."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    value = tl.program_id(2) * PART + tl.arange(0, PART)
    first, num_nodes, state_index = rows_and_state(cu_nodes, state_indices, request)
    node = tl.arange(0, NODES)
    exists = node < num_nodes
    mask = exists[:, None]
    row = first + node
    seen_at = (shape_row(slots, request, slot_rows) + node[:, None]) * max_nodes + node[None, :]
    seen = tl.load(ancestors + seen_at, mask=mask & exists[None, :], other=0) != 0
    related += (row[:, None] * HEADS + head) * (2 * KEY + 2 * _MOST)

    feature = tl.arange(0, KEY_PART)[None, :]
    has_state = value < tl.where(num_nodes > 0, VALUE, 0)
    states += state_index * block_stride + (head * VALUE + value[:, None]) * KEY
    from_keys = tl.zeros([NODES, PART], dtype=tl.float32)
    result = tl.zeros([NODES, PART], dtype=tl.float32)
    for start in range(0, KEY, KEY_PART):
        at = start + feature
        key = tl.load(related + at, mask=mask, other=0.0)
        query = tl.load(related + KEY + at, mask=mask, other=0.0)
        state = tl.load(states + at, mask=has_state[:, None], other=0.0).to(tl.float32)
        from_keys += dot(key, tl.trans(state))
        result += dot(query, tl.trans(state))

    strength = tl.load(strengths + row * strength_stride + head, mask=exists, other=0.0)
    strength = tl.sigmoid(strength.to(tl.float32))[:, None]
    at_value = row[:, None] * (2 * HEADS * KEY + VALUE_HEADS * VALUE) + 2 * HEADS * KEY
    at_value += head * VALUE + value[None, :]
    values = tl.load(convolved + at_value, mask=mask, other=0.0).to(tl.float32)
    wanted = strength * (values - from_keys)
    at_pair = related + 2 * KEY + node[None, :]
    is_above = seen & (node[:, None] != node[None, :])
    coupling = strength * tl.load(at_pair, mask=is_above, other=0.0)
    coupling = tl.where(is_above, coupling, 0.0)
    update = wanted
    # Forward substitution, a level of the tree at once: a level's rows hold after as many rounds.
    for _ in range(depth):
        update = wanted - dot(coupling, tl.where(update * 0.0 == 0, update, 0.0))
    reading = tl.load(at_pair + _MOST, mask=seen, other=0.0)
    result += sum_of_seen(reading, tl.where(seen, 0.0, -1.0), update)

    at_update = (row[:, None] * VALUE_HEADS + head) * VALUE + value[None, :]
    tl.store(output + at_update, result.to(output.dtype.element_ty), mask=mask)
    tl.store(updates + at_update, update, mask=mask)
