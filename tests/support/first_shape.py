"""A mistake in how kernels find trees: they take the first request's for all."""

import triton
import triton.language as tl


@triton.jit
def shape_of_the_first(shapes, slots, request, stride):
    """In the place of `kernels.tree_shapes.shape_of`, in the module of a kernel."""
    return shapes + tl.maximum(tl.load(slots), 0) * stride
