"""What Triton takes for aligned: it compiles again where that changes."""

from __future__ import annotations

_DIVISOR = 16


def aligned(count: int) -> int:
    """Not fewer than ``count``, and a multiple of what Triton looks for in numbers."""
    return -(-count // _DIVISOR) * _DIVISOR
