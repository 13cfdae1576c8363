"""When vLLM's FlashAttention reads the contexts of a step's trees on GPUs, and our kernel the rest.

It takes a launch more in each layer. Our kernel reads a context at the speed of memory for few rows
of a tree. For many rows arithmetic takes longer, and FlashAttention's is faster.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ContextRule(NamedTuple):
    """The steps in which FlashAttention reads the contexts."""

    rows: int  # least rows of the largest tree, its root included
    product: int  # least sum over a step's trees of rows times tokens of context

    def holds(self, rows: NDArray[np.int64], contexts: NDArray[np.int64]) -> bool:
        """Whether a step is such a one: int ``[R]``, of each request its tree's rows (0: it has
        none), and the tokens before them."""
        return bool(rows.max(initial=0) >= self.rows and (rows * contexts).sum() >= self.product)


# Both limits are estimates for 8B targets on an H100 until a GPU has timed them.
_ESTIMATED = ContextRule(rows=32, product=64 * 8192)
_RAN_ON: str | None = None  # the GPU on which its limits were measured here; None: none


def usual_rule(on_cpu: bool) -> ContextRule | None:
    """The rule of an engine; None: our kernel reads all contexts, also until a GPU ran the rule."""
    return _ESTIMATED if _RAN_ON and not on_cpu else None
