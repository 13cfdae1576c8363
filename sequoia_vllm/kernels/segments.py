"""Cuts a step's rows into segments, each of which tree attention takes for a request.

One launch, and so one CUDA graph, serves every mix of prompts and trees: docs/internals.md.
"""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from numpy.typing import NDArray
from torch import Tensor

# A tile of 128 rows, where four query heads share a key head.
_LEAST_ROWS = 32
TREE = 0
"""Slot of the tree's mask in `with_chain`; a chain's is the last, as of changing trees."""


def with_chain(ancestors: Tensor) -> Tensor:
    """Adds a chain to a tree's ancestor matrix.

    Args:
        ancestors: bool ``[N, N]``: which nodes each sees.

    Returns:
        bool ``[2, W, W]`` on its device: the tree, and a chain of W = max(N, 32) rows.
    """
    missing = max(_LEAST_ROWS - len(ancestors), 0)
    tree = F.pad(ancestors, (0, missing, 0, missing))
    tree.fill_diagonal_(True)
    return torch.stack([tree, torch.ones_like(tree).tril()])


def most_segments(requests: int, rows: int, width: int) -> int:
    """Bound on the segments of so many requests with so many rows in all."""
    return requests + rows // width


def cut_rows(
    rows: NDArray[np.int32], has_tree: NDArray[np.bool_], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Segments of a batch: one of each tree, and of ``width`` rows or fewer of each other request.

    Args:
        rows: int32 ``[R]``: of each request, one after another.
        has_tree: bool ``[R]``: whether they are nodes of a tree, at most ``width``.

    Returns:
        int64 ``[segments]``, the request of each, and int32 ``[segments]``, its first row.
    """
    pieces = np.where(has_tree, 1, -(-rows // width))
    requests = np.repeat(np.arange(len(rows)), pieces)
    earlier = np.arange(len(requests)) - (np.cumsum(pieces) - pieces)[requests]
    starts = (np.cumsum(rows) - rows)[requests] + earlier * width
    return requests, starts.astype(np.int32)
