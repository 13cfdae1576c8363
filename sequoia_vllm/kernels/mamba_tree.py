# mypy: allow-untyped-defs
"""Trees over a Mamba2 layer: what it adds to `recurrent_tree`.

Along a path a head's state S takes a token with input x, step dt and vectors B and C as
S' = e^{A dt} S + dt x B^T, with output S' C + D x. In the common form g = A dt, k = B and u = dt x:
no node's u depends on another's.
"""

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.recurrent_tree import KeptNodes, ScoredNodes, score_heads
from sequoia_vllm.kernels.recurrent_tree_kernels import (
    decays_of,
    dot,
    keep_head,
    products,
    rows_and_state,
    softplus,
)


def score_nodes(
    convolved: Tensor,
    dt: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    *,
    nodes: ScoredNodes,
    states: Tensor,
    kept: KeptNodes,
    layer: int = 0,
    output: Tensor,
) -> None:
    """Computes all nodes' outputs from the states before their trees, which stay as they are.

    Args:
        convolved: ``[T, C]``, contiguous: x of all heads, then B and C of all groups.
        dt: ``[T, Hv]``, contiguous in its rows: a node's step is ``softplus(dt + dt_bias)``.
        a, d, dt_bias: ``[Hv]``: A, D, and what is added to steps.
        nodes, states, kept, layer, output: See `score_heads`, which raises ValueError.
    """
    score_heads(
        score_mamba_kernel, convolved, dt, dt.stride(0), a, d, dt_bias,
        nodes=nodes, states=states, kept=kept, layer=layer, output=output,
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
    result = tl.exp(decay)[:, None] * with_state + dot(since * with_keys, update)
    result += tl.load(d + head).to(tl.float32) * x
    keep_head(
        result, update, decay, at_keys, 1.0, output, updates, decays, keys, row, exists, head,
        value, HEADS, VALUE_HEADS, KEY, VALUE, KEY_PART,
    )  # fmt: skip
