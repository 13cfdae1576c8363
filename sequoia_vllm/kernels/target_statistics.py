# mypy: allow-untyped-defs
"""Maximum and sum of the target's rows, from blocks that the whole GPU takes.

The verifier walks with one program per request, which reads a row at the speed of one
multiprocessor. Where a batch has few rows, most of the GPU has nothing else to do: it
looks at all rows at once, visited or not.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels import modes as draft_modes

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

    Returns float32 ``[rows, blocks, 2]``, for `merge_statistics`.
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
