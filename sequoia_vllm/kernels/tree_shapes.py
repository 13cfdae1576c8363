# mypy: allow-untyped-defs
"""How kernels find a request's tree. A shape of ``dims`` dimensions, of which the first counts
rows (nodes), is for all requests. With one more in front each request slot has its own.
"""

import triton
import triton.language as tl
from torch import Tensor


def rows_per_slot(shapes: Tensor, dims: int) -> int:
    """Rows from one request slot's shape to the next one's; 0: all have one shape."""
    return shapes.shape[1] if shapes.ndim > dims else 0


def only_shape(shapes: Tensor, dims: int, reader: str) -> Tensor:
    """The shape of all requests, for one that reads no other. ValueError: they have their own."""
    if shapes.ndim > dims:
        raise ValueError(f"{reader} needs one tree for all requests, but they have their own")
    return shapes


@triton.jit
def shape_row(slots, request, slot_rows):
    """The first row of a request's shape. Padding has slot -1, and takes the first one's."""
    return tl.maximum(tl.load(slots + request), 0).to(tl.int32) * slot_rows
