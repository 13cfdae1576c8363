# mypy: allow-untyped-defs
"""How kernels find a request's tree: one shape for all requests, or one for each request slot.

A shape of ``dims`` dimensions is for all requests. With one dimension more, the first one counts
request slots. Its stride is 0 where all slots share the memory of one shape.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def shape_stride(shapes: Tensor, dims: int) -> int:
    """Numbers from one request slot's shape to the next one's; 0: all have one shape."""
    return shapes.stride(0) if shapes.ndim > dims else 0


def only_shape(shapes: Tensor, dims: int, reader: str) -> Tensor:
    """The shape of all requests, for a reader that knows no other.

    Raises:
        ValueError: Requests have shapes of their own.
    """
    if shape_stride(shapes, dims):
        raise ValueError(f"{reader} needs one tree for all requests, but they have their own")
    return shapes[0] if shapes.ndim > dims else shapes


def slots_of_shapes(shapes: Tensor, dims: int, slots: Tensor | None, unread: Tensor) -> Tensor:
    """The slots ``[R]`` for `shape_of`; where there are none any R integers, as all have one shape.

    Raises:
        ValueError: They have not.
    """
    if slots is not None:
        return slots
    only_shape(shapes, dims, "a batch without request slots")
    return unread


@triton.jit
def shape_of(shapes, slots, request, stride):
    """Where a request's shape begins. Padding has slot -1, and takes the first one's."""
    return shapes + tl.maximum(tl.load(slots + request), 0) * stride
