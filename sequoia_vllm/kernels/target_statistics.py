# mypy: allow-untyped-defs
"""The target's distribution: statistics of its rows, what rejections leave, and draws from that.

**Statistics.** Maximum and sum of the target's rows come from blocks that the whole GPU takes.
The verifier walks with one program per request, which reads a row at the speed of one
multiprocessor. Where a batch has few rows, most of the GPU has nothing else to do: it
looks at all rows at once, visited or not.

**Residuals in closed form.** R starts as P, D as Q. After j rejected children

    R = (P - a*Q - k)+ / c   and   D = Q / s   on the tokens not rejected,

where c is the sum of the numerator, s what Q has left there, and a = k = 0, c = s = 1 at first.
Rejecting another child takes R - D, which adds c/s to a: ``(P - a*Q - k)+ - (c/s)*Q`` has the same
positive part as ``P - (a + c/s)*Q - k``. Once s is exactly 0, D is uniform over the m tokens not
rejected; Q is 0 on all of them, and c/m is added to k instead. Rejected tokens have R = 0, by D > R
there or D = R = 0. So two numbers and the rejected tokens describe R completely.

**Lanes.** Token x belongs to lane ``x % LANES``. Sums go by lanes first, so that rounding grows
with V / LANES. Sampling by inversion then needs no pass of its own: the lanes' sums of the last
pass give the lane, and its up to 64 tokens are computed again. A race of exponentials would need
a Philox call per token, which costs several passes. Which lane's tokens were rejected is one word
of 64 bits.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels import modes as draft_modes
from sequoia_vllm.kernels.children_kernels import draft_probability

_SAMPLED = tl.constexpr(draft_modes.SAMPLED)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""In the place of -inf, which minus itself is NaN."""
_BLOCK = tl.constexpr(4096)
_NUM_WARPS = 4
# An estimate by bytes, measured on no GPU. A walk reads some rows at one multiprocessor's speed.
# This reads all rows at the memory's speed: 0.1 ms instead of 0.4 for 8 trees of 64 nodes (128k
# tokens).
_ROWS_PER_MULTIPROCESSOR = 16
# Triton's interpreter has no multiprocessors: as many as make tests meet both ways.
_INTERPRETED_MULTIPROCESSORS = 2


def pays_off(rows: int, device: torch.device) -> bool:
    """Whether looking at all rows is quicker than having the walk look at some."""
    return rows <= _ROWS_PER_MULTIPROCESSOR * _multiprocessors(device)


def target_statistics(
    logits: Tensor, temperatures: Tensor, modes: Tensor, cu_num_logits: Tensor, most_nodes: int
) -> Tensor:
    """Maximum of logits and sum of exp((logit - maximum) / temperature), by blocks.

    Only rows of requests in mode SAMPLED are written. No argument is read on the host.

    Args:
        logits: ``[rows, V]``, float32, bfloat16 or float16; rows are contiguous.
        temperatures: float32 ``[R]``, positive in mode SAMPLED.
        modes: int32 ``[R]``, of `sequoia_vllm.kernels.modes`.
        cu_num_logits: int32 ``[R + 1]``: rows of each request.
        most_nodes: No request has more rows.

    Returns:
        float32 ``[rows, blocks, 2]``, for `merge_statistics`.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _BLOCK.value)
    partials = torch.empty(rows, blocks, 2, dtype=torch.float32, device=logits.device)
    target_statistics_kernel[(len(modes) * most_nodes, blocks)](
        logits, logits.stride(0), temperatures, modes, cu_num_logits, most_nodes, vocabulary,
        partials, BLOCK=_BLOCK.value, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return partials


def padded_blocks(vocabulary: int) -> int:
    """The power of two of blocks that `merge_statistics` looks at."""
    return triton.next_power_of_2(triton.cdiv(vocabulary, _BLOCK.value))


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


# A batch is verified in chunks, so most tensors begin anywhere in a larger one.
@triton.jit(
    do_not_specialize=["most_nodes"],
    do_not_specialize_on_alignment=["temperatures", "modes", "cu_num_logits"],
)
def target_statistics_kernel(
    logits, logits_stride, temperatures, modes, cu_num_logits, most_nodes, vocabulary, partials,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a node's row per program. Arguments as in `target_statistics`."""
    request, node = tl.program_id(0) // most_nodes, tl.program_id(0) % most_nodes
    block = tl.program_id(1)
    first_row = tl.load(cu_num_logits + request)
    num_nodes = tl.load(cu_num_logits + request + 1) - first_row
    if (node < num_nodes) & (tl.load(modes + request) == _SAMPLED):
        row = (first_row + node).to(tl.int64)
        token = block * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(
            logits + row * logits_stride + token, mask=token < vocabulary, other=float("-inf")
        ).to(tl.float32)
        maximum = tl.maximum(tl.max(logit, axis=0), LOWEST)
        weights = tl.exp((logit - maximum) * tl.div_rn(1.0, tl.load(temperatures + request)))
        partial = partials + (row * tl.num_programs(1) + block) * 2
        tl.store(partial, maximum)
        tl.store(partial + 1, tl.sum(weights, axis=0))


@triton.jit
def merge_statistics(partials, row, inverse_temperature, vocabulary, BLOCKS: tl.constexpr):
    """A row's maximum, float32, and its sum, float64, from those of its blocks."""
    num_blocks = tl.cdiv(vocabulary, _BLOCK)
    block = tl.arange(0, BLOCKS)
    own = partials + (row * num_blocks + block) * 2
    maxima = tl.load(own, mask=block < num_blocks, other=LOWEST)
    totals = tl.load(own + 1, mask=block < num_blocks, other=0.0)
    maximum = tl.max(maxima, axis=0)
    totals = totals * tl.exp((maxima - maximum) * inverse_temperature)
    return maximum, tl.sum(totals.to(tl.float64), axis=0)


@triton.jit
def draw_residual(
    weights, uniform, target_row, draft_row, inverse, target_maximum, target_scale, temperature,
    draft_maximum, draft_total, a, k, rejected, vocabulary, LANES: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """A token by R, int64: its lane by their ``weights``, and one of the lane's tokens."""
    lane = tl.arange(0, LANES)
    chosen, uniform = invert(weights, uniform, LANES)
    step = tl.arange(0, STEPS)
    lane_token = chosen + step * LANES
    bits = tl.sum(tl.where(lane == chosen, rejected, 0), axis=0)
    kept = (lane_token < vocabulary) & (((bits >> step.to(tl.int64)) & 1) == 0)
    p = load_target(target_row, lane_token, kept, inverse, target_maximum, target_scale)
    # A leaf has no Q, and no node needs it while a is 0.
    drafted = kept & (lane_token.to(tl.float32) * 0.0 + a > 0)
    q = load_draft(draft_row, lane_token, drafted, temperature, draft_maximum, draft_total)
    chosen_step, _ = invert(residual(p, q, a, k), uniform, STEPS)
    return (chosen + chosen_step * LANES).to(tl.int64)


@triton.jit
def target_lanes(target_row, inverse, vocabulary, LANES: tl.constexpr, STAGES: tl.constexpr):
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
def residual_lanes(
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
        p = load_target(target_row, token, kept, inverse, target_maximum, target_scale)
        q = load_draft(draft_row, token, kept, temperature, draft_maximum, draft_total)
        weights += residual(p, q, a, k)
        drafts += q
    return weights, drafts


@triton.jit
def load_target(target_row, token, mask, inverse, maximum, scale):
    """P of tokens; 0 where the mask does not hold."""
    logit = tl.load(target_row + token, mask=mask, other=float("-inf"))
    return target_probability(logit, inverse, maximum, scale)


@triton.jit
def load_draft(draft_row, token, mask, temperature, maximum, total):
    """Q of tokens; 0 where the mask does not hold."""
    logit = tl.load(draft_row + token, mask=mask, other=0.0)
    return tl.where(mask, draft_probability(logit, temperature, maximum, total), 0.0)


@triton.jit
def target_probability(logit, inverse, maximum, scale):
    """P.

    All callers use this one expression, so that they agree to the bit. It takes the difference
    first: its rounding is much smaller than that of a logit that a low temperature has made large.
    """
    return tl.exp((logit.to(tl.float32) - maximum) * inverse) * scale


@triton.jit
def residual(p, q, a, k):
    """c * R: the part of P that rejections have left."""
    return tl.maximum(p - a * q - k, 0.0)


@triton.jit
def next_subtraction(target_mass, draft_mass, tokens_left):
    """Terms that another rejection adds to a and k: c/s and 0; once Q is exhausted 0 and c/m."""
    exhausted = draft_mass == 0
    more_a = target_mass / tl.where(exhausted, 1.0, draft_mass)
    more_k = target_mass / tl.maximum(tokens_left, 1)
    return (
        tl.where(exhausted, 0.0, more_a).to(tl.float32),
        tl.where(exhausted, more_k, 0.0).to(tl.float32),
    )


@triton.jit
def sum_of_lanes(lanes):
    """Sums in float64: there are many more terms here than in a lane."""
    return tl.sum(lanes.to(tl.float64), axis=0)


@triton.jit
def invert(weights, uniform, SIZE: tl.constexpr):
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
    # Rounding may leave no index above. Then it is the last one with a weight.
    chosen = tl.minimum(chosen, tl.max(tl.where(possible, index, 0), axis=0))
    weight = tl.sum(tl.where(index == chosen, weights, 0.0), axis=0).to(tl.float64)
    above = tl.sum(tl.where(index == chosen, cumulative, 0.0), axis=0) - threshold
    return chosen, tl.minimum(tl.maximum(1.0 - above / weight, 0.0), 1.0)
