"""A mistake in how kernels find a request's own tree."""

import triton
import triton.language as tl


@triton.jit
def row_of_the_first(slots, request, slot_rows):
    """In the place of `kernels.tree_shapes.shape_row`: all take the first one."""
    return tl.maximum(tl.load(slots), 0).to(tl.int32) * slot_rows
