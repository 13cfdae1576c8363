"""Where the logprobs of emitted tokens stand: a path has fewer tokens than its tree has nodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class EmittedRows(NamedTuple):
    """A row for every token that a batch's trees may emit, request after request.

    The verifier makes it in steps where some request wants logprobs: each row then gets
    those of its token.

    Attributes:
        starts: int64 ``[R + 1]``: the first row of each request, then the number of rows.
        request: int64 ``[T]``: the request of each row.
        column: int64 ``[T]``: which of that request's emitted tokens the row is for.
    """

    starts: NDArray[np.int64]
    request: NDArray[np.int64]
    column: NDArray[np.int64]


def emitted_rows(cu_num_logits: NDArray[np.int32], most: int) -> EmittedRows:
    """The rows of requests that emit at most a token per scored node, and at most ``most``.

    Args:
        cu_num_logits: int32 ``[R + 1]``: the first scored node of each request, then the
            number of all nodes.
        most: One more than the depth of the engine's tree.
    """
    counts = np.minimum(np.diff(cu_num_logits), most).astype(np.int64)
    starts = np.concatenate([[0], counts.cumsum()])
    request = np.repeat(np.arange(len(counts)), counts)
    return EmittedRows(starts, request, np.arange(len(request)) - starts[request])
