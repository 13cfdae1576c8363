# mypy: allow-untyped-defs
"""How kernels find a request's tree, and the request of a row.

A shape of ``dims`` dimensions, of which the first counts rows (nodes), is for all requests. With
one more in front each request slot has its own.
"""

import triton
import triton.language as tl
from torch import Tensor


def rows_per_slot(shapes: Tensor, dims: int) -> int:
    """Rows from one request slot's shape to the next one's; 0: all have one shape."""
    return shapes.shape[1] if shapes.ndim > dims else 0


def only_shape(shapes: Tensor, dims: int, reader: str) -> Tensor:
    """The shape of all requests; refuses shapes of their own, which ``reader`` does not read."""
    if shapes.ndim > dims:
        raise ValueError(f"{reader} needs one tree for all requests, but they have their own")
    return shapes


@triton.jit
def shape_row(slots, request, slot_rows):
    """The first row of a request's shape. Padding has slot -1, and takes the first one's."""
    return tl.maximum(tl.load(slots + request), 0).to(tl.int32) * slot_rows


def search_steps(num_requests: int) -> int:
    """Steps of `request_of` among so many requests."""
    return num_requests.bit_length()


@triton.jit
def request_of(first_rows, row, num_requests, steps):
    """The request that each row belongs to; ``num_requests``: to none, the row is past the last.

    Requests have different numbers of rows, which only the device knows: so it searches.

    Args:
        first_rows: int32 ``[R + 1]``: first row of each request, then the end, ascending from 0.
        row: int32, a number or a block.
        num_requests: R.
        steps: `search_steps` of R.
    """
    found = row * 0
    for step in range(steps):
        later = found + (1 << (steps - 1 - step))
        exists = later <= num_requests
        first = tl.load(first_rows + later, mask=exists, other=0)
        found = tl.where(exists & (first <= row), later, found)
    return found
