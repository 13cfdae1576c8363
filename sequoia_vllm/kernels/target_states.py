# mypy: allow-untyped-defs
"""The target's states along accepted paths, put side by side in one launch.

Trained heads read a committed token together with the target's hidden states at the token before
it. The target's forward has states of all nodes of a tree: those of the accepted path lie
scattered.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.ragged_rows import request_of, search_steps

_MOST_LAYERS = 8
_BLOCK = 1024


def gather_target_states(
    layers: Sequence[Tensor],
    *,
    query_start_loc: Tensor,
    accepted: Tensor | None,
    first_rows: Tensor,
    states: Tensor,
) -> None:
    """Copies rows of every layer's states into one row each.

    Row ``first_rows[r] + j`` belongs to token j of what request r has in this step. A request with
    a tree has the root, and then the accepted nodes by depth; another has its tokens in order.
    Tokens past the accepted ones get the root's states. Rows of no request get the first row's.

    Args:
        layers: ``[T, H]`` of each of L layers, contiguous in their rows: the target's states.
        query_start_loc, first_rows: int32 ``[R + 1]``: first row of each request in T, and among
            those of ``states``, then the end.
        accepted: int32 ``[R', D]``, contiguous in its rows: accepted nodes of the first R'
            requests, which have trees, by depth, then -1. None: none has.
        states: ``[rows, L * H]``, written.

    Raises ValueError: the layers are too many, or not alike.
    """
    if not 0 < len(layers) <= _MOST_LAYERS:
        raise ValueError(f"states of {len(layers)} layers: 1 to {_MOST_LAYERS} can be gathered")
    first = layers[0]
    if any(layer.stride() != first.stride() or layer.dtype != first.dtype for layer in layers):
        raise ValueError("the layers' states differ in dtype or layout")
    rows, hidden, requests = len(states), first.shape[1], len(first_rows) - 1
    if not rows:
        return
    trees, depth, stride = 0, 0, 0
    if accepted is not None:
        (trees, depth), stride = accepted.shape, accepted.stride(0)
    pointers = [*layers, *[first] * (_MOST_LAYERS - len(layers))]
    gather_target_states_kernel[(rows, triton.cdiv(hidden, _BLOCK))](
        *pointers, first.stride(0), query_start_loc, requests, search_steps(requests),
        query_start_loc if accepted is None else accepted, stride, trees, depth,
        first_rows, states, states.stride(0), hidden,
        LAYERS=len(layers), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


# Paths begin after a column of counts; where nobody has a tree there are none.
@triton.jit(
    do_not_specialize=["num_requests", "steps", "accepted_stride", "trees", "depth"],
    do_not_specialize_on_alignment=["accepted"],
)
def gather_target_states_kernel(
    layer_0, layer_1, layer_2, layer_3, layer_4, layer_5, layer_6, layer_7, layer_stride,
    query_start_loc, num_requests, steps, accepted, accepted_stride, trees, depth,
    first_rows, states, states_stride, hidden,
    LAYERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of one row per program. Arguments as in `gather_target_states`."""
    row = tl.program_id(0)
    request = request_of(first_rows, row, num_requests, steps)
    is_there = request < num_requests
    offset = row - tl.load(first_rows + request)
    offset = tl.where(is_there, offset, 0)
    on_path = is_there & (request < trees) & (offset > 0)
    path = accepted + request * accepted_stride
    node = tl.load(path + offset - 1, mask=on_path & (offset <= depth), other=-1)
    step = tl.where(on_path, tl.maximum(node, 0), offset)
    start = tl.load(query_start_loc + request, mask=is_there, other=0)
    end = tl.load(query_start_loc + request + 1, mask=is_there, other=1)
    source = tl.where(start + step < end, start + step, start).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    target = states + row.to(tl.int64) * states_stride + column
    for layer in tl.static_range(LAYERS):
        if layer == 0:
            pointer = layer_0
        elif layer == 1:
            pointer = layer_1
        elif layer == 2:
            pointer = layer_2
        elif layer == 3:
            pointer = layer_3
        elif layer == 4:
            pointer = layer_4
        elif layer == 5:
            pointer = layer_5
        elif layer == 6:
            pointer = layer_6
        else:
            pointer = layer_7
        values = tl.load(pointer + source * layer_stride + column, mask=inside)
        tl.store(target + layer * hidden, values, mask=inside)
