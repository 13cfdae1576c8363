"""Trees of request slots' own, and a mistake in how kernels find them."""

import triton
import triton.language as tl

from sequoia_vllm.tree import TokenTree

# One, two and one nodes with children at depths 0, 1 and 2.
OWN_TREES = [
    TokenTree(parents)
    for parents in (
        (-1, 0, 0, 1, 1, 2, 3), (-1, 0, 0, 1, 2, 2, 5),
        (-1, 0, 0, 2, 2, 1, 3), (-1, 0, 1, 0, 2, 3, 3),
    )
]  # fmt: skip


@triton.jit
def row_of_the_first(slots, request, slot_rows):
    """In the place of `kernels.tree_shapes.shape_row`: all take the first one."""
    return tl.maximum(tl.load(slots), 0).to(tl.int32) * slot_rows
