# mypy: allow-untyped-defs
"""Trees over Gated DeltaNet, Mamba2 and linear attention: what each adds to `recurrent_tree`.

**Gated DeltaNet.** Along a path a head's state S takes a token with key k (of length 1), value v,
decay a = e^g and strength b as S' = a S (I - b k k^T) + b v k^T. In the common form

    u_i = b_i (v_i - e^{G_i} S0 k_i - sum over j before i of e^{G_i - G_j} (k_j . k_i) u_j)

where j runs over node i's ancestors.

**Mamba2.** Along a path a head's state S takes a token with input x, step dt and vectors B and C as
S' = e^{A dt} S + dt x B^T, with output S' C + D x. In the common form g = A dt, k = B and u = dt x:
no node's u depends on another's. Linear attention is Mamba2 with steps of 1, A = g and D = 0.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.recurrent_tree import KeptNodes, ScoredNodes, score_heads
from sequoia_vllm.kernels.recurrent_tree_kernels import dot, rows_and_state
from sequoia_vllm.kernels.tree_shapes import shape_row

_STEP = 32.0  # softplus leaves it as it is; to divide by it and to multiply by it loses nothing


def score_gdn(
    convolved: Tensor,
    a: Tensor,
    b: Tensor,
    log_a: Tensor,
    dt_bias: Tensor,
    nodes: ScoredNodes,
    kept: KeptNodes,
    **shared: Any,
) -> None:
    """Computes all nodes' outputs from the states before their trees, which stay as they are.

    Args:
        convolved: ``[T, C]``, contiguous: queries, keys, values.
        a, b: ``[T, Hv]``, contiguous: g is ``-exp(log_a) * softplus(a + dt_bias)``, a node's
            strength ``sigmoid(b)``.
        log_a, dt_bias: ``[Hv]``.
        nodes, kept, shared: See `score_heads`, also for errors.
    """
    assert kept.shape is not None
    inputs = convolved, a, b, log_a, dt_bias, nodes.depth, kept.shape.key**-0.5
    score_heads(score_gdn_kernel, *inputs, nodes=nodes, kept=kept, **shared)


def score_mamba(
    convolved: Tensor, dt: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor, **shared: Any
) -> None:
    """Computes all nodes' outputs from the states before their trees, which stay as they are.

    Args:
        convolved: ``[T, C]``, contiguous: x of all heads, then B and C of all groups.
        dt: ``[T, Hv]``, contiguous in its rows: a node's step is ``softplus(dt + dt_bias)``.
        a, d, dt_bias: ``[Hv]``: A, D, and what is added to steps.
        shared: See `score_heads`, also for errors.
    """
    score_heads(score_mamba_kernel, convolved, dt, dt.stride(0), a, d, dt_bias, **shared)


def score_linear(
    queries: Tensor, keys: Tensor, values: Tensor, slopes: Tensor, **shared: Any
) -> None:
    """Computes all nodes' outputs from the states before their trees, which stay as they are.

    Args:
        queries, keys: ``[T, H, K]``, scaled.
        values: ``[T, H, V]``.
        slopes: float32 ``[H]``: a head's g is its slope's negative.
        shared: See `score_heads`, also for errors.
    """
    none = slopes.new_zeros(len(slopes))
    inputs = torch.cat([each.flatten(1) for each in (values / _STEP, keys, queries)], dim=1)
    steps = (none + _STEP).expand(len(inputs), -1)
    score_mamba(inputs, steps, slopes / -_STEP, none, none, **shared)


@triton.jit(
    do_not_specialize=["depth", "slot_rows", "max_nodes"],
    do_not_specialize_on_alignment=["state_indices", "cu_nodes", "slots"],
)
def score_gdn_kernel(
    convolved, a, b, log_a, dt_bias, depth, scale, states, block_stride, state_indices, cu_nodes,
    slots, ancestors, slot_rows, max_nodes, keys, updates, decays, output,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PART: tl.constexpr, NODES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """All nodes of one request, in one head and a part of its values."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // HEADS)
    value = tl.program_id(2) * PART + tl.arange(0, PART)
    first, num_nodes, state_index = rows_and_state(cu_nodes, state_indices, request)
    node = tl.arange(0, NODES)
    exists = node < num_nodes
    row = first + node

    at_gate = row * VALUE_HEADS + head
    gate = tl.load(a + at_gate, mask=exists, other=0.0).to(tl.float32)
    gate += tl.load(dt_bias + head).to(tl.float32)
    log_decay = -tl.exp(tl.load(log_a + head).to(tl.float32)) * softplus(gate)
    strength = tl.sigmoid(tl.load(b + at_gate, mask=exists, other=0.0).to(tl.float32))

    decay, since = decays_of(
        log_decay, slots, request, slot_rows, ancestors, max_nodes, node, exists
    )
    before = tl.exp(decay)[:, None]

    vectors = row[:, None] * (2 * HEADS * KEY + VALUE_HEADS * VALUE)
    has_state = value < tl.where(num_nodes > 0, VALUE, 0)
    states += state_index * block_stride + (head * VALUE + value[:, None]) * KEY
    at_keys = convolved + vectors + (HEADS + key_head) * KEY
    at_value = vectors + 2 * HEADS * KEY + head * VALUE + value[None, :]
    update = tl.load(convolved + at_value, mask=exists[:, None], other=0.0).to(tl.float32)
    with_keys, with_state, squared = products(
        at_keys, at_keys, states, exists, has_state, KEY, KEY_PART, NODES, PART
    )
    # As vLLM's decoding kernel makes vectors of length 1.
    per_key = 1.0 / tl.sqrt(squared + 1e-6)
    wanted = strength[:, None] * (update - before * with_state * per_key[:, None])
    coupling = (strength * per_key)[:, None] * since * with_keys * per_key[None, :]
    coupling = tl.where((since < 0) | (node[:, None] == node[None, :]), 0.0, coupling)
    update = wanted
    # Forward substitution, a level of the tree at once: a level's rows hold after as many rounds.
    for _ in range(depth):
        update = wanted - dot(coupling, tl.where(update * 0.0 == 0, update, 0.0))
    with_keys, with_state, squared = products(
        convolved + vectors + key_head * KEY, at_keys, states, exists, has_state, KEY, KEY_PART,
        NODES, PART,
    )  # fmt: skip
    per_query = (scale / tl.sqrt(squared + 1e-6))[:, None]
    reading = per_query * since * with_keys * per_key[None, :]
    result = before * with_state * per_query + sum_of_seen(reading, since, update)

    keep_head(
        result, update, decay, at_keys, per_key[:, None], output, updates, decays, keys, row,
        exists, head, value, HEADS, VALUE_HEADS, KEY, VALUE, KEY_PART,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["slot_rows", "max_nodes"],
    do_not_specialize_on_alignment=["dt", "state_indices", "cu_nodes", "slots"],
)
def score_mamba_kernel(
    convolved, dt, dt_stride, a, d, dt_bias, states, block_stride, state_indices, cu_nodes, slots,
    ancestors, slot_rows, max_nodes, keys, updates, decays, output,
    HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PART: tl.constexpr, NODES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """All nodes of one request, in one head and a part of its values."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    group = head // (VALUE_HEADS // HEADS)
    value = tl.program_id(2) * PART + tl.arange(0, PART)
    first, num_nodes, state_index = rows_and_state(cu_nodes, state_indices, request)
    node = tl.arange(0, NODES)
    exists = node < num_nodes
    row = first + node

    step = tl.load(dt + row * dt_stride + head, mask=exists, other=0.0).to(tl.float32)
    step = softplus(step + tl.load(dt_bias + head).to(tl.float32))
    log_decay = tl.load(a + head).to(tl.float32) * step
    decay, since = decays_of(
        log_decay, slots, request, slot_rows, ancestors, max_nodes, node, exists
    )
    vectors = row[:, None] * (VALUE_HEADS * VALUE + 2 * HEADS * KEY)
    has_state = value < tl.where(num_nodes > 0, VALUE, 0)
    states += state_index * block_stride + (head * VALUE + value[:, None]) * KEY
    at_keys = convolved + vectors + VALUE_HEADS * VALUE + group * KEY
    x = tl.load(
        convolved + vectors + head * VALUE + value[None, :], mask=exists[:, None], other=0.0
    ).to(tl.float32)
    update = step[:, None] * x
    with_keys, with_state, _ = products(
        at_keys + HEADS * KEY, at_keys, states, exists, has_state, KEY, KEY_PART, NODES, PART
    )
    result = tl.exp(decay)[:, None] * with_state + sum_of_seen(since * with_keys, since, update)
    result += tl.load(d + head).to(tl.float32) * x
    keep_head(
        result, update, decay, at_keys, 1.0, output, updates, decays, keys, row, exists, head,
        value, HEADS, VALUE_HEADS, KEY, VALUE, KEY_PART,
    )  # fmt: skip


@triton.jit
def products(
    vectors, keys, states, exists, has_state,
    KEY: tl.constexpr, KEY_PART: tl.constexpr, NODES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Products of nodes' vectors with keys and with the state, and the vectors' lengths squared."""
    feature = tl.arange(0, KEY_PART)[None, :]
    with_keys = tl.zeros([NODES, NODES], dtype=tl.float32)
    with_state = tl.zeros([NODES, PART], dtype=tl.float32)
    squared = tl.zeros([NODES], dtype=tl.float32)
    for start in range(0, KEY, KEY_PART):
        at = start + feature
        vector = tl.load(vectors + at, mask=exists[:, None], other=0.0).to(tl.float32)
        key = tl.load(keys + at, mask=exists[:, None], other=0.0).to(tl.float32)
        state = tl.load(states + at, mask=has_state[:, None], other=0.0).to(tl.float32)
        with_keys += dot(vector, tl.trans(key))
        with_state += dot(vector, tl.trans(state))
        squared += tl.sum(vector * vector, axis=1)
    return with_keys, with_state, squared


@triton.jit
def softplus(value):
    """The softplus of float32 values, with the same cut at 20 as vLLM's kernels."""
    return tl.where(value <= 20.0, tl.log(1.0 + tl.exp(value)), value)


@triton.jit
def decays_of(log_decay, slots, request, slot_rows, ancestors, max_nodes, node, exists):
    """G of each node, and e^{G_i - G_j} where node i sees j, else -1."""
    seen_at = (shape_row(slots, request, slot_rows) + node[:, None]) * max_nodes + node[None, :]
    both = exists[:, None] & exists[None, :]
    seen = tl.load(ancestors + seen_at, mask=both, other=0) != 0
    decay = tl.sum(tl.where(seen, log_decay[None, :], 0.0), axis=1)
    since = tl.exp(tl.where(seen, decay[:, None] - decay[None, :], 0.0))
    return decay, tl.where(seen, since, -1.0)


@triton.jit
def sum_of_seen(weights, since, update):
    """Each node's weighted sum of the updates that it sees; NaN is a sum's that sees it alone."""
    nothing = update * 0.0  # or NaN
    weights += tl.sum(nothing, axis=1)[None, :]
    return dot(tl.where(since < 0, 0.0, weights), tl.where(nothing == 0, update, 0.0))


@triton.jit
def keep_head(
    result, update, decay, at_keys, per_key, output, updates, decays, keys, row, exists, head,
    value, HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PART: tl.constexpr,
):  # fmt: skip
    """Writes a head's outputs, u, G, and k: keys that a factor makes those of the form."""
    at_head = row * VALUE_HEADS + head
    at_update = at_head[:, None] * VALUE + value[None, :]
    tl.store(output + at_update, result.to(output.dtype.element_ty), mask=exists[:, None])
    tl.store(updates + at_update, update, mask=exists[:, None])
    if tl.program_id(2) == 0:
        tl.store(decays + at_head, decay, mask=exists)
        group: tl.constexpr = VALUE_HEADS // HEADS
        if head % group == 0:
            feature = tl.arange(0, KEY_PART)[None, :]
            at_kept = keys + (row[:, None] * HEADS + head // group) * KEY + feature
            for start in range(0, KEY, KEY_PART):
                key = tl.load(at_keys + start + feature, mask=exists[:, None], other=0.0)
                tl.store(at_kept + start, key.to(tl.float32) * per_key, mask=exists[:, None])
