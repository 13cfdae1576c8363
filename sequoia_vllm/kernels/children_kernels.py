# mypy: allow-untyped-defs
"""Q, and draws from it without replacement: the kernels of `DraftedTrees.draw`.

`draft_probability` is the one definition of Q: it serves the draws and, from the statistics kept
here, the verifier. A draw is a race: every token of a row gets a score, and the highest are its
children (arXiv 2402.12374, section 3.2.2). Logits below the row's ``lowest`` are lowered first
(`sequoia_vllm.kernels.truncation`). The first kernel computes the statistics that Q needs of each
row. The second scores blocks of the vocabulary and keeps each block's best. It also raises the
token that the request's text says comes next (`sequoia_vllm.verification.retrieval`), in the kept
logits, too. The third merges blocks.
"""

import math

import triton
import triton.language as tl

from sequoia_vllm.kernels import modes as _modes
from sequoia_vllm.kernels.random import DRAW, exponential, target_noise
from sequoia_vllm.kernels.tree_shapes import shape_row
from sequoia_vllm.kernels.truncation import lower_outside
from sequoia_vllm.verification.retrieval import TOLD_SHARE

_SKIP = tl.constexpr(_modes.SKIP)
_SAMPLED = tl.constexpr(_modes.SAMPLED)
_SEEDED = tl.constexpr(_modes.SEEDED)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
# Scores stay normal float32: Q is 2**-126 to 1, arrival 2**-57 to 17.
_SCORE_SCALE = tl.constexpr(2.0**32)
_TOLD_LOG_ODDS = tl.constexpr(math.log(TOLD_SHARE / (1 - TOLD_SHARE)))
# Below the key of any score.
_NO_TOKEN = tl.constexpr(-(2**63))


@triton.jit
def scale_logits(logits, temperature):
    """Logits times 1 / temperature, float32: the same bits wherever Q is looked at.

    It takes one division, and a product per logit. A rounded division for each logit takes twice
    the instructions of everything else, and registers that the verifier lacks.
    """
    return logits.to(tl.float32) * tl.div_rn(1.0, temperature)


@triton.jit
def draft_probability(logits, temperature, maximum, total):
    """Q of tokens, float32: what drafts are drawn from and verified against.

    Values below the smallest normal float32 are 0: some devices flush them. NaN is 0, too. So a
    row with NaN or +inf, or without a finite logit, has no Q at all. Its children are drawn
    uniformly, and verified so.

    Args:
        logits: Raw draft logits, any floating type, any shape.
        temperature: float32 above 0, scalar: the request's.
        maximum, total: float32, scalars, from ``draft_stats``: the row's largest
            scaled logit, and the sum of exp(scaled logit - maximum).
    """
    weight = tl.exp(scale_logits(logits, temperature) - maximum)
    probability = weight * tl.div_rn(1.0, total)
    return tl.where(probability >= _SMALLEST_NORMAL, probability, 0.0)


@triton.jit
def race_scores(probability, seed, token, position, node):
    """Scores whose k highest, in order, are k draws from Q without replacement.

    A token arrives after an exponential time over its probability; the order of
    arrival is the order of draws. Tokens that Q lacks come after all others, in
    uniformly random order.
    """
    arrival = exponential(seed, token, position, node, DRAW)
    return tl.where(probability > 0.0, probability * _SCORE_SCALE / arrival, -arrival)


@triton.jit
def _keys(scores, tokens, exists):
    """int64 with the order of scores; of equal ones the lower token is higher.

    NaN has a place in that order, too: every token can be drawn, and only once.
    """
    scores = tl.where(scores == 0.0, 0.0, scores)  # not -0.0, whose bits differ
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered.to(tl.int64) << 32) | (2147483647 - tokens).to(tl.int64)
    return tl.where(exists, keys, _NO_TOKEN)


@triton.jit
def _token_of(key):
    return 2147483647 - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _merge_statistics(partials, num_blocks, BLOCKS: tl.constexpr):
    """Maximum and sum of a row from those of its blocks."""
    block = tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    maxima = tl.load(partials + 2 * block, mask=is_block, other=float("-inf"))
    totals = tl.load(partials + 2 * block + 1, mask=is_block, other=0.0)
    maximum = tl.max(maxima)
    return maximum, tl.sum(totals * tl.exp(maxima - maximum))


@triton.jit
def _told_token(told, told_columns, own_tokens, request, node, depth, vocabulary):
    """The token that the request's text says comes after a node; -1: it says nothing."""
    own = told + request.to(tl.int64) * told_columns + depth
    is_told = depth < told_columns
    token = tl.load(own, mask=is_told, other=-1)
    is_below = is_told & (depth > 0)
    before = tl.load(own - 1, mask=is_below, other=0)
    node_token = tl.load(own_tokens + node, mask=is_below, other=0)
    return tl.where((token < vocabulary) & (node_token == before), token, -1)


@triton.jit
def _raise_told(raw, temperature, maximum, total):
    """A raw logit with at least `TOLD_SHARE` of Q, and the row's statistics with it.

    Args:
        raw: The token's logit as it was.
        temperature: The request's.
        maximum, total: Of the row as it was.
    """
    scaled = scale_logits(raw, temperature)
    raised = ((maximum + tl.log(total) + _TOLD_LOG_ODDS) * temperature).to(raw.dtype)
    scaled_up = scale_logits(raised, temperature)
    total -= tl.exp(scaled - maximum)
    new_maximum = tl.maximum(maximum, scaled_up)
    total = total * tl.exp(maximum - new_maximum) + tl.exp(scaled_up - new_maximum)
    return raised, new_maximum, total


# Where these begin in memory depends on batch and level, and so do these numbers. Neither needs
# another compiled version.
_ANYWHERE = [
    "lowest", "temperature", "seeds", "modes", "positions", "nodes", "counts", "columns",
    "candidates", "tokens", "draft_stats", "state_rows", "inner_rows", "slots", "told",
]  # fmt: skip
_NUMBERS = [
    "width", "depth", "num_state_rows", "num_blocks", "max_children", "stats_state_stride",
    "stats_inner_stride", "tokens_stride", "slot_rows", "told_columns", "of_all",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def row_statistics_kernel(
    logits, logits_stride, lowest, temperature, modes, slots, slot_rows, width, vocabulary,
    partials, draft_logits, draft_state_stride, draft_inner_stride, num_state_rows, state_rows,
    inner_rows, of_all, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes maximum and sum of each block of sampled rows, and copies their logits of Q.

    Unless ``of_all`` is 0, it does so for greedy rows, too, at temperature 1; it copies nothing.
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    request = row // width
    is_sampled = tl.load(modes + request) == _SAMPLED
    if is_sampled | (of_all != 0):
        token = block * BLOCK + tl.arange(0, BLOCK)
        exists = token < vocabulary
        raw = tl.load(
            logits + row.to(tl.int64) * logits_stride + token, mask=exists, other=float("-inf")
        )
        own_temperature = tl.where(is_sampled, tl.load(temperature + request), 1.0)
        raw = lower_outside(raw, tl.load(lowest + row), own_temperature)
        state_row = tl.load(state_rows + request).to(tl.int64)
        if is_sampled & (state_row >= 0) & (state_row < num_state_rows):
            place = shape_row(slots, request, slot_rows) + row % width
            inner_row = tl.load(inner_rows + place).to(tl.int64)
            kept = draft_logits + state_row * draft_state_stride + inner_row * draft_inner_stride
            tl.store(kept + token, raw, mask=exists)
        scaled = scale_logits(raw, own_temperature)
        maximum = tl.max(scaled)
        # A block may lack finite logits in a row that has some, and -inf - -inf is NaN.
        weights = tl.where(scaled == float("-inf"), 0.0, tl.exp(scaled - maximum))
        partial = partials + (row.to(tl.int64) * tl.num_programs(1) + block) * 2
        tl.store(partial, maximum)
        tl.store(partial + 1, tl.sum(weights))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def block_best_kernel(
    logits, logits_stride, lowest, temperature, seeds, modes, positions, depth, slots, slot_rows,
    nodes, counts, width, vocabulary, partials, candidates, told, told_columns, tokens,
    tokens_stride, draft_logits, draft_state_stride, draft_inner_stride,
    draft_stats, stats_state_stride, stats_inner_stride, num_state_rows, state_rows, inner_rows,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """The best tokens of each block, as many as the node has children, best first."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    request = row // width
    mode = tl.load(modes + request)
    if mode != _SKIP:
        place = shape_row(slots, request, slot_rows) + row % width
        token = block * BLOCK + tl.arange(0, BLOCK)
        exists = token < vocabulary
        raw = tl.load(
            logits + row.to(tl.int64) * logits_stride + token, mask=exists, other=float("-inf")
        )
        own_temperature = tl.load(temperature + request)
        raw = lower_outside(raw, tl.load(lowest + row), own_temperature)
        scores = raw.to(tl.float32)
        position = tl.load(positions + request) + depth
        node = tl.load(nodes + place)
        told_token = _told_token(
            told, told_columns, tokens + request.to(tl.int64) * tokens_stride, request, node,
            depth, vocabulary,
        )  # fmt: skip
        if mode == _SAMPLED:
            first_partial = partials + row.to(tl.int64) * num_blocks * 2
            maximum, total = _merge_statistics(first_partial, num_blocks, BLOCKS)
            state_row = tl.load(state_rows + request).to(tl.int64)
            keeps = (block == 0) & (state_row >= 0) & (state_row < num_state_rows)
            inner_row = tl.load(inner_rows + place).to(tl.int64)
            if told_token >= 0:
                before = tl.load(logits + row.to(tl.int64) * logits_stride + told_token)
                before = lower_outside(before, tl.load(lowest + row), own_temperature)
                raised, maximum, total = _raise_told(before, own_temperature, maximum, total)
                raw = tl.where(token == told_token, raised, raw)
                kept = draft_logits + state_row * draft_state_stride
                tl.store(kept + inner_row * draft_inner_stride + told_token, raised, mask=keeps)
            if keeps:
                stats = draft_stats + state_row * stats_state_stride
                tl.store(stats + inner_row * stats_inner_stride, maximum)
                tl.store(stats + inner_row * stats_inner_stride + 1, total)
            probability = draft_probability(raw, own_temperature, maximum, total)
            scores = race_scores(probability, tl.load(seeds + request), token, position, node)
        if mode == _SEEDED:
            noise = target_noise(tl.load(seeds + request), position, token)
            scores = scale_logits(raw, own_temperature) + noise
        if mode != _SAMPLED:
            scores = tl.where(token == told_token, float("inf"), scores)
        keys = _keys(scores, token, exists)
        own = candidates + (row.to(tl.int64) * num_blocks + block) * BRANCH
        for rank in range(tl.load(counts + place)):
            best = tl.max(keys)
            tl.store(own + rank, best)
            keys = tl.where(keys == best, _NO_TOKEN, keys)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def merge_best_kernel(
    modes, slots, slot_rows, counts, columns, max_children, width, num_blocks, candidates, tokens,
    tokens_stride, BLOCKS: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """The best of all blocks, written where the node's children are."""
    row = tl.program_id(0)
    request = row // width
    place = shape_row(slots, request, slot_rows) + row % width
    count = tl.load(counts + place)
    own_columns = columns + place * max_children
    own_tokens = tokens + request.to(tl.int64) * tokens_stride
    if tl.load(modes + request) == _SKIP:
        for rank in range(count):
            tl.store(own_tokens + tl.load(own_columns + rank), 0)
    else:
        index = tl.arange(0, BLOCKS * BRANCH)
        written = (index // BRANCH < num_blocks) & (index % BRANCH < count)
        own = candidates + row.to(tl.int64) * num_blocks * BRANCH
        keys = tl.load(own + index, mask=written, other=_NO_TOKEN)
        for rank in range(count):
            best = tl.max(keys)
            tl.store(own_tokens + tl.load(own_columns + rank), _token_of(best))
            keys = tl.where(keys == best, _NO_TOKEN, keys)
