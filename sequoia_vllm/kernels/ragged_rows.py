# mypy: allow-untyped-defs
"""Rows of requests that follow one another, a different number of each.

Only the device knows how many rows a request has. So kernels find the request of a row by search.
"""

import triton
import triton.language as tl


def search_steps(num_requests: int) -> int:
    """Steps of `request_of` among so many requests."""
    return num_requests.bit_length()


@triton.jit
def request_of(first_rows, row, num_requests, steps):
    """The request that each row belongs to; ``num_requests``: to none, the row is past the last.

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
