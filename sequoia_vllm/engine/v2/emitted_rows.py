"""Where the logprobs of emitted tokens stand: a path has fewer tokens than its tree has nodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class EmittedRows(NamedTuple):
    """Rows for every token that a batch's trees may emit, request after request.

    Attributes:
        starts: int ``[R + 1]``: the first row of each request, and their number.
        request: int64 ``[T]``: request of each row...
        column: int64 ``[T]``: ...and which of its tokens it is for.
    """

    starts: NDArray[np.int64]
    request: NDArray[np.int64]
    column: NDArray[np.int64]


def emitted_rows(cu_num_logits: NDArray[np.int32], most: int) -> EmittedRows:
    """Rows of requests that emit one token per scored node, and ``most`` at most.

    Args:
        cu_num_logits: int32 ``[R + 1]``: first scored node of each request.
        most: Depth of the engine's tree, and one.
    """
    counts = np.minimum(np.diff(cu_num_logits), most).astype(np.int64)
    starts = np.concatenate([[0], counts.cumsum()])
    request = np.repeat(np.arange(len(counts)), counts)
    return EmittedRows(starts, request, np.arange(len(request)) - starts[request])
