# mypy: allow-untyped-defs
"""Dynamic trees on GPUs: what `sequoia_vllm.drafting.dynamic_trees` does, in few launches.

At each level the children of its nodes are drawn as ever: they are *candidates*, in the columns of
one row per request; column 0 is the root. `choose_nodes_kernel` gives them the logarithm of their
path probability, and chooses which of them get children. In the end `best_nodes_kernel` takes the
likeliest. `write_trees_kernel` makes the tables by which the target's pass finds each one's tree.
"""

import triton
import triton.language as tl

from sequoia_vllm.kernels.children_kernels import (
    _NO_TOKEN,
    _keys,
    _merge_statistics,
    _raise_told,
    _token_of,
    _told_token,
)


@triton.jit(
    do_not_specialize=[
        "num_blocks", "told_columns", "depth", "width", "first_column", "first", "next_width",
        "inner", "num_words",
    ],
    do_not_specialize_on_alignment=["partials", "told", "nodes", "next_nodes", "next_parents"],
)  # fmt: skip
def choose_nodes_kernel(
    logits, logits_stride, partials, num_blocks, vocabulary, slots, told, told_columns,
    tokens, values, parents, columns, nodes, depth, width, first_column, first,
    next_nodes, next_parents, next_width, words, inner, num_words,
    CHILDREN: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One request per program. Arguments as in `DynamicLevels.draw`.

    The children of the level's node i are in columns ``first_column + i * CHILDREN`` on. Node i is
    place ``first + i`` of all nodes that the draft reads, of which there are ``inner``.
    """
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    state = tl.maximum(slot, 0)
    own = request.to(tl.int64) * columns
    tokens, values, parents = tokens + own, values + own, parents + own
    for place in range(width):
        row = (request * width + place).to(tl.int64)
        node = tl.load(nodes + state * width + place)
        maximum, total = _merge_statistics(partials + row * num_blocks * 2, num_blocks, BLOCKS)
        column = first_column + place * CHILDREN + tl.arange(0, CHILDREN)
        token = tl.load(tokens + column)
        own_logits = logits + row * logits_stride
        raw = tl.load(own_logits + token)
        told_token = _told_token(told, told_columns, tokens, request, node, depth, vocabulary)
        if told_token >= 0:
            before = tl.load(own_logits + told_token)
            raised, maximum, total = _raise_told(before, 1.0, maximum, total)
            raw = tl.where(token == told_token, raised, raw)
        value = raw.to(tl.float32) - maximum - tl.log(total)
        # A draft that gives NaN drafts anything. No child may come before its parent.
        value = tl.where(value == value, tl.minimum(value, 0.0), float("-inf"))
        tl.store(values + column, value + tl.load(values + node))
        tl.store(parents + column, node + tl.zeros_like(column))
    tl.debug_barrier()
    candidate = tl.arange(0, LANES)
    exists = candidate < width * CHILDREN
    value = tl.load(values + first_column + candidate, mask=exists, other=float("-inf"))
    keys = _keys(value, candidate, exists)
    word = tl.arange(0, WORDS)
    is_word = word < tl.where(slot >= 0, num_words, 0)
    for place in range(next_width):
        best = tl.max(keys)
        keys = tl.where(keys == best, _NO_TOKEN, keys)
        chosen = _token_of(best)
        above = chosen // CHILDREN
        own_place = state * next_width + place
        tl.store(next_nodes + own_place, first_column + chosen, mask=slot >= 0)
        tl.store(next_parents + own_place, above.to(tl.int64), mask=slot >= 0)
        itself = first + width + place
        of_parent = words + (state * inner + first + above) * num_words
        seen = tl.load(of_parent + word, mask=is_word, other=0)
        seen |= tl.where(word == itself // 32, 1 << (itself % 32), 0)
        tl.store(words + (state * inner + itself) * num_words + word, seen, mask=is_word)


@triton.jit(do_not_specialize=["num_candidates", "num_nodes", "columns", "drafted_stride", "width"])
def best_nodes_kernel(
    tokens, values, parents, node_at, columns, num_candidates, num_nodes, drafted, drafted_stride,
    tree_parents, width, LANES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One request per program: its likeliest candidates, upper levels first where equally likely.

    ``node_at`` is memory. Written are tokens and parents of the ``num_nodes`` nodes but the root's.
    """
    request = tl.program_id(0).to(tl.int64)
    own = request * columns
    tokens, values, parents, node_at = tokens + own, values + own, parents + own, node_at + own
    column = tl.arange(0, LANES)
    is_candidate = (column > 0) & (column <= num_candidates)
    value = tl.load(values + column, mask=is_candidate, other=0.0)
    key = _keys(value, column, is_candidate)
    node = tl.where(column > 0, 1, 0)
    for start in range(1, num_candidates + 1, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        exists = other <= num_candidates
        other_key = _keys(tl.load(values + other, mask=exists, other=0.0), other, exists)
        better = (other_key[None, :] > key[:, None]) & (column > 0)[:, None]
        node += tl.sum(better.to(tl.int32), axis=1)
    tl.store(node_at + column, node, mask=column <= num_candidates)
    tl.debug_barrier()
    is_node = is_candidate & (node < num_nodes)
    parent = tl.load(parents + column, mask=is_node, other=0)
    parent_node = tl.load(node_at + parent, mask=is_node, other=0)
    token = tl.load(tokens + column, mask=is_node, other=0)
    tl.store(drafted + request * drafted_stride + node, token, mask=is_node)
    tl.store(tree_parents + request * width + node, parent_node, mask=is_node)


@triton.jit(do_not_specialize=["parents_stride", "depth", "branch"])
def write_trees_kernel(
    slots, given, parents_stride, depth, parents, shifts, children, branch, ancestors, words,
    depths, WIDTH: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Writes one request's tree per program into the tables of its slot, see `SlotTables`.

    ``given``: int32, its nodes' parents in a row of WIDTH; -1: the root, and nodes without a tree.
    """
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    if slot >= 0:
        given += request * parents_stride
        node = tl.arange(0, NODES)
        exists = node < WIDTH
        row = slot * WIDTH + node
        parent = tl.load(given + node, mask=exists, other=-1)
        own_depth, earlier = tl.zeros_like(node), tl.zeros_like(node)
        for word in range(WIDTH // 32):
            seen = word * 32 + tl.arange(0, 32)[None, :]
            sees, above = node[:, None] == seen, parent
            own_depth = tl.zeros_like(node)
            for _ in range(depth):
                own_depth += (above >= 0).to(tl.int32)
                sees = sees | (above[:, None] == seen)
                above = tl.load(given + above, mask=above >= 0, other=-1)
            tl.store(ancestors + row[:, None] * WIDTH + seen, sees, mask=exists[:, None])
            bits = tl.sum(tl.where(sees, 1 << (seen % 32), 0), axis=1)
            tl.store(words + row * (WIDTH // 32) + word, bits, mask=exists)
            is_sibling = (parent[:, None] == tl.load(given + seen)) & (seen < node[:, None])
            earlier += tl.sum(is_sibling.to(tl.int32), axis=1)
        tl.store(parents + row, parent, mask=exists)
        tl.store(depths + row, own_depth, mask=exists)
        tl.store(shifts + row, (own_depth - node).to(tl.int64), mask=exists)
        for place in range(branch):
            tl.store(children + row * branch + place, tl.full([NODES], -1, tl.int32), mask=exists)
        tl.debug_barrier()
        is_child = exists & (parent >= 0) & (earlier < branch)
        tl.store(children + (slot * WIDTH + parent) * branch + earlier, node, mask=is_child)
