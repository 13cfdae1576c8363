# mypy: allow-untyped-defs
"""The Triton code that all kinds of recurrent layers share: see `kernels.recurrent_tree`.

Rows of a pass are nodes, request by request in stored order. A request whose state index is 0 or
less is a CUDA graph's padding: nothing of it is read or written, as in vLLM's kernels.
"""

import triton
import triton.language as tl

from sequoia_vllm.kernels.tree_shapes import shape_row

# Trees differ in depth, and views begin anywhere: neither needs another compiled version.
_NUMBERS_OF_PATHS = ["depth", "accepted_stride", "table_stride", "block_size", "layer_rows"]
_POINTERS_OF_PATHS = [
    "addresses", "places", "state_indices", "cu_nodes", "accepted", "block_table", "context_lens",
]  # fmt: skip


@triton.jit
def rows_and_state(cu_nodes, state_indices, request):
    """First row of a request, its nodes, and where its state is."""
    first = tl.load(cu_nodes + request).to(tl.int64)
    state = tl.load(state_indices + request).to(tl.int64)
    nodes = tl.load(cu_nodes + request + 1) - first
    return first, tl.where(state > 0, nodes, 0), state


@triton.jit(
    do_not_specialize=["slot_rows"],
    do_not_specialize_on_alignment=["state_indices", "cu_nodes", "slots"],
)
def convolve_nodes_kernel(
    inputs, input_stride, weights, bias, history, block_stride, channel_stride, token_stride,
    state_indices, cu_nodes, slots, parents, slot_rows, kept, convolved, channels,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, NODES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some nodes and channels of one request; sums in the order and dtypes of vLLM's kernel."""
    request = tl.program_id(0)
    node = tl.program_id(1) * NODES + tl.arange(0, NODES)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    first, num_nodes, state = rows_and_state(cu_nodes, state_indices, request)
    exists = node < num_nodes
    in_range = channel < channels
    mask = exists[:, None] & in_range[None, :]
    parents += shape_row(slots, request, slot_rows)
    history += state * block_stride + channel[None, :].to(tl.int64) * channel_stride
    sums = tl.zeros([NODES, CHANNELS], dtype=tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + channel, mask=in_range, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source = node
        above_root = tl.zeros_like(node)
        for _ in tl.static_range(WIDTH - 1 - tap):
            source = tl.load(parents + source, mask=exists & (source >= 0), other=-1)
            above_root += (source < 0).to(tl.int32)
        is_node = (source >= 0)[:, None]
        rows = (first + source)[:, None] * input_stride + channel[None, :]
        own = tl.load(inputs + rows, mask=mask & is_node, other=0.0)
        places = (WIDTH - 1 - above_root)[:, None] * token_stride
        old = tl.load(history + places, mask=mask & (is_node == 0), other=0.0)
        weight = tl.load(weights + channel * WIDTH + tap, mask=in_range, other=0.0)
        value = tl.where(is_node, own, old.to(own.dtype)).to(tl.float32)
        # The product of bfloat16 is bfloat16, which Triton's interpreter does not know.
        sums += (value * weight.to(tl.float32)[None, :]).to(own.dtype).to(tl.float32)
        if tap == WIDTH - 1:
            rows = (first + node)[:, None] * channels + channel[None, :]
            tl.store(kept + rows, own, mask=mask)
    if SILU:
        sums = sums / (1 + tl.exp(-sums))
    rows = (first + node)[:, None] * channels + channel[None, :]
    tl.store(convolved + rows, sums.to(convolved.dtype.element_ty), mask=mask)


@triton.jit
def dot(left, right):
    """Product of float32 matrices by tensor cores."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _accepted_tokens(accepted, request, accepted_stride, depth, num_nodes, PATH: tl.constexpr):
    """The accepted path, root first, and how many tokens it has: 0 for padding."""
    step = tl.arange(0, PATH)
    below = (step > 0) & (step <= tl.where(num_nodes > 0, depth, 0))
    at = accepted + request.to(tl.int64) * accepted_stride + step - 1
    path = tl.where(step == 0, 0, tl.load(at, mask=below, other=-1))
    return path, tl.where(num_nodes > 0, tl.sum((path >= 0).to(tl.int32)), 0)


@triton.jit
def _state_at_edge(
    block_table, table_stride, context_lens, request, tokens, block_size
):  # fmt: skip
    """Tokens of a path up to the end of a block within it, and that block's state; 0 and 0: none.

    vLLM gives a state to others where it ends with a block of tokens.
    """
    start = tl.load(context_lens + request)
    edge = (start + tokens) // block_size * block_size
    is_within = (edge > start) & (edge < start + tokens)
    column = block_table + request.to(tl.int64) * table_stride + edge // block_size - 1
    state = tl.load(column, mask=is_within, other=0).to(tl.int64)
    return tl.where(state > 0, edge - start, 0), state


@triton.jit
def _shifted(
    source, target, token_stride, kept, row_stride, channel, mask, accepted, tokens,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes the last inputs of a path of so many tokens, which may be in place."""
    for place in tl.static_range(WIDTH - 1):
        step = tokens + place - (WIDTH - 1)
        is_old = step + tl.zeros_like(channel) < 0
        node = tl.load(accepted + step - 1, mask=step > 0, other=0)
        old = tl.load(source + (tokens + place) * token_stride, mask=mask & is_old, other=0.0)
        new = tl.load(kept + node * row_stride + channel, mask=mask & (is_old == 0), other=0.0)
        tl.store(target + place * token_stride, tl.where(is_old, old, new.to(old.dtype)), mask=mask)


@triton.jit(do_not_specialize=_NUMBERS_OF_PATHS, do_not_specialize_on_alignment=_POINTERS_OF_PATHS)
def commit_inputs_kernel(
    addresses, places, block_stride, channel_stride, token_stride, kept, layer_rows, channels,
    state_indices, cu_nodes, accepted, accepted_stride, depth, block_table, table_stride,
    context_lens, block_size,
    TYPE: tl.constexpr, WIDTH: tl.constexpr, PATH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some channels of one request in one layer: the last inputs of the accepted path."""
    request = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    first, num_nodes, state = rows_and_state(cu_nodes, state_indices, request)
    _, tokens = _accepted_tokens(accepted, request, accepted_stride, depth, num_nodes, PATH)
    if tokens > 0:
        blocks = tl.load(addresses + layer).to(tl.pointer_type(TYPE))
        blocks += channel.to(tl.int64) * channel_stride
        kept += (tl.load(places + layer).to(tl.int64) * layer_rows + first) * channels
        accepted += request.to(tl.int64) * accepted_stride
        source = blocks + state * block_stride
        to_edge, edge_state = _state_at_edge(
            block_table, table_stride, context_lens, request, tokens, block_size
        )
        if to_edge > 0:
            _shifted(
                source, blocks + edge_state * block_stride, token_stride, kept, channels, channel,
                mask, accepted, to_edge, WIDTH,
            )  # fmt: skip
        _shifted(
            source, source, token_stride, kept, channels, channel, mask, accepted, tokens, WIDTH
        )


@triton.jit
def _state_after(state, keys, updates, decay, tokens, PATH: tl.constexpr):
    """The state after so many tokens of the path; later ones may be NaN, and are not read."""
    step = tl.arange(0, PATH)
    taken = step < tokens
    key = tl.load(keys, mask=taken[:, None], other=0.0)
    update = tl.load(updates, mask=taken[:, None], other=0.0)
    last = tl.sum(tl.where(step == tokens - 1, decay, 0.0))
    since = tl.where(taken, tl.exp(tl.where(taken, last - decay, 0.0)), 0.0)
    return tl.exp(last) * state + dot(tl.trans(update * since[:, None]), key)


@triton.jit(do_not_specialize=_NUMBERS_OF_PATHS, do_not_specialize_on_alignment=_POINTERS_OF_PATHS)
def commit_states_kernel(
    addresses, places, block_stride, keys, updates, decays, layer_rows,
    state_indices, cu_nodes, accepted, accepted_stride, depth, block_table, table_stride,
    context_lens, block_size,
    TYPE: tl.constexpr, HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PART: tl.constexpr, PATH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A part of one head's state of one request in one layer: the accepted path, replayed."""
    request = tl.program_id(0)
    layer = (tl.program_id(1) // VALUE_HEADS).to(tl.int64)
    head = tl.program_id(1) % VALUE_HEADS
    value = tl.program_id(2) // (KEY // KEY_PART) * PART + tl.arange(0, PART)
    feature = tl.program_id(2) % (KEY // KEY_PART) * KEY_PART + tl.arange(0, KEY_PART)
    first, num_nodes, state_index = rows_and_state(cu_nodes, state_indices, request)
    path, tokens = _accepted_tokens(accepted, request, accepted_stride, depth, num_nodes, PATH)
    if tokens > 0:
        row = tl.load(places + layer).to(tl.int64) * layer_rows + first + path
        at_key = (row[:, None] * HEADS + head // (VALUE_HEADS // HEADS)) * KEY + feature[None, :]
        at_head = row * VALUE_HEADS + head
        at_update = at_head[:, None] * VALUE + value[None, :]
        own_keys, own_updates = keys + at_key, updates + at_update
        decay = tl.load(decays + at_head, mask=path >= 0, other=0.0)
        blocks = tl.load(addresses + layer).to(tl.pointer_type(TYPE))
        blocks += (head * VALUE + value[:, None]) * KEY + feature[None, :]
        state = tl.load(blocks + state_index * block_stride).to(tl.float32)
        to_edge, edge_state = _state_at_edge(
            block_table, table_stride, context_lens, request, tokens, block_size
        )
        if to_edge > 0:
            at_edge = _state_after(state, own_keys, own_updates, decay, to_edge, PATH)
            tl.store(blocks + edge_state * block_stride, at_edge.to(TYPE))
        final = _state_after(state, own_keys, own_updates, decay, tokens, PATH)
        tl.store(blocks + state_index * block_stride, final.to(TYPE))


@triton.jit(do_not_specialize=_NUMBERS_OF_PATHS, do_not_specialize_on_alignment=_POINTERS_OF_PATHS)
def commit_channels_kernel(
    addresses, places, block_stride, keys, updates, decays, layer_rows,
    state_indices, cu_nodes, accepted, accepted_stride, depth, block_table, table_stride,
    context_lens, block_size,
    TYPE: tl.constexpr, HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PART: tl.constexpr, PATH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """`commit_states_kernel` for decays by channel: token by token."""
    request = tl.program_id(0)
    layer = (tl.program_id(1) // VALUE_HEADS).to(tl.int64)
    head = tl.program_id(1) % VALUE_HEADS
    value = tl.program_id(2) // (KEY // KEY_PART) * PART + tl.arange(0, PART)
    feature = tl.program_id(2) % (KEY // KEY_PART) * KEY_PART + tl.arange(0, KEY_PART)
    first, num_nodes, state_index = rows_and_state(cu_nodes, state_indices, request)
    _, tokens = _accepted_tokens(accepted, request, accepted_stride, depth, num_nodes, PATH)
    if tokens > 0:
        first += tl.load(places + layer).to(tl.int64) * layer_rows
        accepted += request.to(tl.int64) * accepted_stride
        blocks = tl.load(addresses + layer).to(tl.pointer_type(TYPE))
        blocks += (head * VALUE + value[:, None]) * KEY + feature[None, :]
        state = tl.load(blocks + state_index * block_stride).to(tl.float32)
        to_edge, edge_state = _state_at_edge(
            block_table, table_stride, context_lens, request, tokens, block_size
        )
        for step in range(tokens):
            node = tl.load(accepted + step - 1, mask=step > 0, other=0)
            row = first + node
            at_key = (row * HEADS + head // (VALUE_HEADS // HEADS)) * KEY + feature
            key, decay = tl.load(keys + at_key), tl.load(decays + at_key)
            update = tl.load(updates + (row * VALUE_HEADS + head) * VALUE + value)
            state = state * tl.exp(decay)[None, :] + update[:, None] * key[None, :]
            if step + 1 == to_edge:
                tl.store(blocks + edge_state * block_stride, state.to(TYPE))
        tl.store(blocks + state_index * block_stride, state.to(TYPE))
