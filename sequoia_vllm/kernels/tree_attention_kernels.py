# mypy: allow-untyped-defs
"""The Triton code of `sequoia_vllm.kernels.tree_attention`, and how it divides the work.

Rows are pairs of a node and a query head of one key head's group, node by node.
Positions 0 to c - 1 of a request are context, position c + j is node j. They are
taken in blocks of ``KEYS``; runs of equally many blocks are the splits. A block
that lies wholly in the context needs no mask; in the others each row has one bit
per position, and those of the context are 1.

A layer may have a window: a row then sees no position before that of its node's depth, less the
window. No row sees positions before the window of a request's root: blocks are counted from there.
Those that some row of a tile sees in part are masked, too.

Where EXTRA is not 0, keys have so many channels more than values. Without OWN_VALUES these are the
keys' first ones: a latent (MLA). Each position is then read once.

Maxima and log-sum-exps are in base 2, of scores times ``scale`` (which therefore
holds log2(e) too), capped softly or not.
"""

import triton
import triton.language as tl

from sequoia_vllm.kernels.tree_shapes import shape_row

PLAN_COLUMNS = 4
"""Numbers of a request in `split_plan.SplitPlan.requests`."""


@triton.jit
def _blocks_per_split(num_positions, splits, KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Blocks in each split of a request; the last splits may get fewer or none."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_positions, KEYS), splits), MIN_BLOCKS)


@triton.jit
def window_start(context, window, KEYS: tl.constexpr):
    """Where a request's blocks start: the one that holds the start of its root's window."""
    return tl.maximum(context - window + 1, 0) // KEYS * KEYS


@triton.jit
def _capped(scores, soft_cap):
    """``soft_cap * tanh(scores / soft_cap)``."""
    rest = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / soft_cap))
    capped = soft_cap * (1.0 - rest) / (1.0 + rest)
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def _load_words(word_pointers, row_exists, word, WORDS: tl.constexpr):
    """Word number ``word`` of each row's mask, as uint64; words before the first are context."""
    words = word + tl.zeros_like(row_exists).to(tl.int32)
    stored = row_exists & (words >= 0) & (words < WORDS)
    bits = tl.load(word_pointers + words, mask=stored, other=0)
    return tl.where(words < 0, -1, bits).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _seen(word_pointers, row_exists, first, KEYS: tl.constexpr, WORDS: tl.constexpr):
    """Bit 0 of ``[row, k]``: the row sees node ``first + k`` (context, where that is negative)."""
    key = tl.arange(0, KEYS)
    seen = tl.zeros_like(row_exists[:, None] & (key >= 0)[None, :]).to(tl.uint32)
    for part in tl.static_range((KEYS + 31) // 32):
        node = first + 32 * part
        low = _load_words(word_pointers, row_exists, node >> 5, WORDS)
        high = _load_words(word_pointers, row_exists, (node >> 5) + 1, WORDS)
        bits = (((high << 32) | low) >> (node & 31).to(tl.uint64)).to(tl.uint32)
        shifted = bits[:, None] >> (key % 32).to(tl.uint32)[None, :]
        seen = tl.where((key // 32 == part)[None, :], shifted, seen)
    return seen & 1


@triton.jit
def _attend_block(
    accumulator, maximum, total, query, extra_query, word_pointers, row_exists,
    key_cache, value_cache, blocks, key_block_stride, key_slot_stride, value_block_stride,
    value_slot_stride, start, end, context, first_seen, lowest, scale, soft_cap,
    HEAD_SIZE: tl.constexpr, PADDED_HEAD_SIZE: tl.constexpr, EXTRA: tl.constexpr,
    OWN_VALUES: tl.constexpr, BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, SOFT_CAPPED: tl.constexpr,
):  # fmt: skip
    """Takes positions ``start`` to ``start + KEYS`` into the running softmax.

    Without MASKED all of them must be context, and within every row's window. Before
    ``lowest`` no window of the request begins, and blocks may be gone.
    """
    position = start + tl.arange(0, KEYS)
    channel = tl.arange(0, PADDED_HEAD_SIZE)
    is_channel = channel < HEAD_SIZE
    # Past the end there may be NaN, and 0 times NaN is NaN. So nothing there is read.
    exists = position < end if MASKED else position >= 0
    if WINDOWED:
        exists &= position >= lowest
    block = tl.load(blocks + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    slot = position % BLOCK_SIZE
    key_rows = key_cache + block * key_block_stride + slot * key_slot_stride
    keys = tl.load(
        key_rows[None, :] + channel[:, None], mask=exists[None, :] & is_channel[:, None], other=0.0
    )
    scores = tl.dot(query, keys.to(query.dtype), input_precision="ieee")
    if EXTRA:
        extra_keys = tl.load(
            key_rows[None, :] + HEAD_SIZE + tl.arange(0, EXTRA)[:, None],
            mask=exists[None, :],
            other=0.0,
        )
        scores = tl.dot(extra_query, extra_keys.to(query.dtype), scores, input_precision="ieee")
    if SOFT_CAPPED:
        scores = _capped(scores * scale, soft_cap)
        scale = 1.0
    if MASKED:
        seen = _seen(word_pointers, row_exists, start - context, KEYS, WORDS) != 0
        seen &= exists[None, :]
        if WINDOWED:
            # Nodes before the window are not in the words.
            seen &= (position[None, :] >= first_seen[:, None]) | (position >= context)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
    reference = new_maximum
    if MASKED:  # a row may have seen nothing yet, and -inf minus -inf is NaN
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores * scale - reference[:, None])
    decay = tl.exp2(maximum - reference)
    total = total * decay + tl.sum(weights, axis=1)
    if OWN_VALUES:
        value_rows = value_cache + block * value_block_stride + slot * value_slot_stride
        values = tl.load(
            value_rows[:, None] + channel[None, :],
            mask=exists[:, None] & is_channel[None, :],
            other=0.0,
        )
    else:
        values = tl.trans(keys)
    accumulator = tl.dot(
        weights.to(query.dtype),
        values.to(query.dtype),
        accumulator * decay[:, None],
        input_precision="ieee",
    )
    return accumulator, new_maximum, total


# Numbers that depend on the batch or the tree, and addresses of small tensors, need no other
# compiled version.
@triton.jit(
    do_not_specialize=[
        "first_node", "splits", "row_tiles", "max_positions", "table_stride", "slot_rows",
        "ancestors_stride", "context_lse_stride", "window", "ahead",
    ],
    do_not_specialize_on_alignment=[
        "block_table", "context_lens", "query_start_loc", "slots", "ancestors", "depths",
        "key_scale", "value_scale", "context_lse", "sinks", "plan", "programs",
    ],
)  # fmt: skip
def tree_attention_kernel(
    query, key_cache, value_cache, block_table, context_lens, query_start_loc, slots,
    ancestors, depths, key_scale, value_scale, partial_output, partial_lse, output, context_lse,
    sinks, plan, programs,
    scale, soft_cap, window, ahead, first_node, splits, row_tiles, max_positions,
    query_token_stride, query_head_stride,
    key_block_stride, key_slot_stride, key_head_stride,
    value_block_stride, value_slot_stride, value_head_stride,
    table_stride, slot_rows, ancestors_stride, output_token_stride, output_head_stride,
    context_lse_stride,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr, QUANTIZED: tl.constexpr,
    SCALES_IN_MEMORY: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, ONLY_NODES: tl.constexpr, WINDOWED: tl.constexpr,
    SOFT_CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, EXTRA: tl.constexpr,
    OWN_VALUES: tl.constexpr, PLANNED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Attention of ``ROWS`` rows over one split, for one key head of one request.

    Grid: (row_tiles * splits, key heads, requests); row tiles fastest, so that
    programs that read the same keys run together and find them in the L2 cache.

    A request with one live split is written to ``output``. Otherwise each split
    writes its normalised output, float32 ``[splits, R, Hkv, row_tiles * ROWS,
    HEAD_SIZE]``, and its log-sum-exp, ``[splits, R, Hkv, row_tiles * ROWS]``.

    With ONLY_NODES there is one split, and the softmax goes on from ``output``, which
    holds the attention over the context, and ``context_lse``, its natural log-sum-exp.

    With HAS_SINKS the softmax of the first split starts with the sinks' scores.

    With PLANNED the grid is (programs, key heads): a `SplitPlan` says which request each takes.
    Its partial results are those of the plan, ``[partials, Hkv, ROWS]``.
    """
    key_head = tl.program_id(1)
    request = tl.program_id(2)
    if PLANNED:
        request = tl.load(programs + tl.program_id(0))
        if request < 0:
            return
    first_token = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - first_token
    place = tl.program_id(0)
    if PLANNED:
        place -= tl.load(plan + request * COLUMNS + 1)
        row_tiles = tl.cdiv(num_queries * GROUP, ROWS)
    tile = place % row_tiles
    split = place // row_tiles
    if tile * ROWS >= num_queries * GROUP:
        return
    context = tl.load(context_lens + request)
    first_position = window_start(context, window, KEYS) if WINDOWED else 0
    num_positions = context + first_node + num_queries - first_position
    if PLANNED:
        split_blocks = tl.load(plan + request * COLUMNS)
    else:
        split_blocks = _blocks_per_split(num_positions, splits, KEYS, MIN_BLOCKS)
    split_start = context if ONLY_NODES else first_position + split * split_blocks * KEYS
    if split_start >= first_position + num_positions:
        return

    row = tile * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED_HEAD_SIZE)
    is_channel = channel < HEAD_SIZE
    node = row // GROUP
    row_exists = node < num_queries
    token = (first_token + node).to(tl.int64)
    head = key_head * GROUP + row % GROUP
    query_rows = query + (token * query_token_stride + head * query_head_stride)[:, None]
    queries = tl.load(
        query_rows + channel[None, :], mask=row_exists[:, None] & is_channel[None, :], other=0.0
    )
    extra_queries = queries
    if EXTRA:
        extra = HEAD_SIZE + tl.arange(0, EXTRA)[None, :]
        extra_queries = tl.load(query_rows + extra, mask=row_exists[:, None], other=0.0)
    mask_row = shape_row(slots, request, slot_rows) + first_node + node
    word_pointers = ancestors + mask_row * ancestors_stride
    if QUANTIZED:
        scale *= tl.load(key_scale) if SCALES_IN_MEMORY else key_scale

    # Nodes later than the tile's last, and as many ahead as a node may see, are seen by no
    # row here. Nor are the positions past those that there are read: nodes there are beyond the
    # model's length, and not used. What they hold may be NaN, which a weight of 0 leaves NaN.
    last_seen = tl.minimum((tile * ROWS + ROWS - 1) // GROUP + ahead, num_queries - 1)
    end = tl.minimum(context + first_node + last_seen + 1, max_positions)
    split_end = tl.minimum(split_start + split_blocks * KEYS, end)
    unmasked_end = tl.maximum(tl.minimum(split_end, context) // KEYS * KEYS, split_start)
    first_seen = tl.zeros([ROWS], dtype=tl.int32)
    lowest = 0
    if WINDOWED:
        depth = tl.load(depths + mask_row, mask=row_exists, other=0)
        lowest = context - window + 1
        first_seen = lowest + depth
    blocks = block_table + request.to(tl.int64) * table_stride
    key_cache += key_head.to(tl.int64) * key_head_stride
    value_cache += key_head.to(tl.int64) * value_head_stride
    if ONLY_NODES:
        context_rows = output + token * output_token_stride + head * output_head_stride
        accumulator = tl.load(
            context_rows[:, None] + channel[None, :],
            mask=row_exists[:, None] & is_channel[None, :],
            other=0.0,
        ).to(tl.float32)
        sums = context_lse + head * context_lse_stride + token
        maximum = tl.load(sums, mask=row_exists, other=float("-inf")) * 1.4426950408889634
        total = tl.where(maximum == float("-inf"), 0.0, 1.0)
    else:
        accumulator = tl.zeros([ROWS, PADDED_HEAD_SIZE], dtype=tl.float32)
        maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            maximum = tl.where(split == 0, sink, maximum)
            total = tl.where(split == 0, 1.0, total)
        unmasked_start = split_start
        if WINDOWED:
            # From here on every row's window has begun.
            begun = tl.cdiv(tl.maximum(tl.max(first_seen, axis=0), 0), KEYS) * KEYS
            unmasked_start = tl.minimum(tl.maximum(begun, split_start), unmasked_end)
            for start in tl.range(split_start, unmasked_start, KEYS):
                accumulator, maximum, total = _attend_block(
                    accumulator, maximum, total, queries, extra_queries, word_pointers, row_exists,
                    key_cache, value_cache, blocks, key_block_stride, key_slot_stride,
                    value_block_stride, value_slot_stride, start, end, context, first_seen, lowest,
                    scale, soft_cap, HEAD_SIZE, PADDED_HEAD_SIZE, EXTRA, OWN_VALUES, BLOCK_SIZE,
                    WORDS, KEYS, True, WINDOWED, SOFT_CAPPED,
                )  # fmt: skip
        for start in tl.range(unmasked_start, unmasked_end, KEYS):
            accumulator, maximum, total = _attend_block(
                accumulator, maximum, total, queries, extra_queries, word_pointers, row_exists,
                key_cache, value_cache, blocks, key_block_stride, key_slot_stride,
                value_block_stride, value_slot_stride, start, end, context, first_seen, lowest,
                scale, soft_cap, HEAD_SIZE, PADDED_HEAD_SIZE, EXTRA, OWN_VALUES, BLOCK_SIZE, WORDS,
                KEYS, False, WINDOWED, SOFT_CAPPED,
            )  # fmt: skip
    for start in tl.range(unmasked_end, split_end, KEYS):
        accumulator, maximum, total = _attend_block(
            accumulator, maximum, total, queries, extra_queries, word_pointers, row_exists,
            key_cache, value_cache, blocks, key_block_stride, key_slot_stride,
            value_block_stride, value_slot_stride, start, end, context, first_seen, lowest,
            scale, soft_cap, HEAD_SIZE, PADDED_HEAD_SIZE, EXTRA, OWN_VALUES, BLOCK_SIZE, WORDS,
            KEYS, True, WINDOWED, SOFT_CAPPED,
        )  # fmt: skip

    # In a split that holds only nodes a row may see nothing: output 0, weight 2**-inf.
    saw_nothing = total == 0.0
    total = tl.where(saw_nothing, 1.0, total)
    accumulator /= total[:, None]
    if QUANTIZED:
        accumulator *= tl.load(value_scale) if SCALES_IN_MEMORY else value_scale
    written = row_exists[:, None] & is_channel[None, :]
    if PLANNED:  # loaded here only: registers are few
        first_partial = tl.load(plan + request * COLUMNS + 2)
        is_whole = first_partial < 0
    else:
        is_whole = split_blocks * KEYS >= num_positions
    if is_whole:
        output_rows = output + token * output_token_stride + head * output_head_stride
        result = accumulator.to(output.dtype.element_ty)
        tl.store(output_rows[:, None] + channel[None, :], result, mask=written)
    else:
        if PLANNED:
            place = tl.program_id(0) - tl.load(plan + request * COLUMNS + 1)
            unit = (first_partial + place) * tl.num_programs(1) + key_head
            partial_row = unit.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        else:
            unit = (split * tl.num_programs(2) + request) * tl.num_programs(1) + key_head
            partial_row = unit.to(tl.int64) * row_tiles * ROWS + row
        partial_rows = partial_output + partial_row * HEAD_SIZE
        tl.store(partial_rows[:, None] + channel[None, :], accumulator, mask=written)
        lse = tl.where(saw_nothing, float("-inf"), maximum + tl.log2(total))
        tl.store(partial_lse + partial_row, lse, mask=row_exists)


@triton.jit(
    do_not_specialize=["first_node", "splits", "window"],
    do_not_specialize_on_alignment=["context_lens", "query_start_loc", "plan", "merged"],
)
def merge_splits_kernel(
    partial_output, partial_lse, context_lens, query_start_loc, output, plan, merged,
    window, first_node, splits, padded_rows, output_token_stride, output_head_stride,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_HEAD_SIZE: tl.constexpr,
    KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr, WINDOWED: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr, PLANNED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Joins the live splits of one row. Grid: (rows of the largest request, key heads, requests).

    A row per program: all of its splits are in flight together.

    With PLANNED the grid is (rows of a tile, key heads, tiles that a `SplitPlan` has merged), and
    ``padded_rows`` are a tile's.
    """
    row = tl.program_id(0)
    key_head = tl.program_id(1)
    request = tl.program_id(2)
    tile = 0
    if PLANNED:
        request = tl.load(merged + tl.program_id(2))
        if request < 0:
            return
        tile = tl.program_id(2) - tl.load(plan + request * COLUMNS + 3)
        row += tile * padded_rows
    first_token = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - first_token
    node = row // GROUP
    if node >= num_queries:
        return
    context = tl.load(context_lens + request)
    first_position = window_start(context, window, KEYS) if WINDOWED else 0
    num_positions = context + first_node + num_queries - first_position
    if PLANNED:
        split_blocks = tl.load(plan + request * COLUMNS)
    else:
        split_blocks = _blocks_per_split(num_positions, splits, KEYS, MIN_BLOCKS)
    live = tl.cdiv(num_positions, split_blocks * KEYS)
    if live <= 1:  # written already
        return

    channel = tl.arange(0, PADDED_HEAD_SIZE)
    is_channel = channel < HEAD_SIZE
    unit, units = request, tl.num_programs(2)
    if PLANNED:
        unit = tl.load(plan + request * COLUMNS + 2) + tile
        units = tl.cdiv(num_queries * GROUP, padded_rows)
    unit = unit * tl.num_programs(1) + key_head
    first_row = unit.to(tl.int64) * padded_rows + row - tile * padded_rows
    rows_per_split = (units * tl.num_programs(1)).to(tl.int64) * padded_rows
    accumulator = tl.zeros([PADDED_HEAD_SIZE], dtype=tl.float32)
    maximum = float("-inf")
    total = 0.0
    for first_split in tl.range(0, live, SPLITS_AT_ONCE):
        split = first_split + tl.arange(0, SPLITS_AT_ONCE)
        is_live = split < live
        partial_row = first_row + split * rows_per_split
        lse = tl.load(partial_lse + partial_row, mask=is_live, other=float("-inf"))
        outputs = tl.load(
            (partial_output + partial_row * HEAD_SIZE)[:, None] + channel[None, :],
            mask=is_live[:, None] & is_channel[None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(lse - reference)
        decay = tl.exp2(maximum - reference)
        accumulator = accumulator * decay + tl.sum(outputs * weights[:, None], axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        maximum = new_maximum
    token = (first_token + node).to(tl.int64)
    head = key_head * GROUP + row % GROUP
    result = (accumulator / total).to(output.dtype.element_ty)
    rows = output + token * output_token_stride + head * output_head_stride
    tl.store(rows + channel, result, mask=is_channel)
