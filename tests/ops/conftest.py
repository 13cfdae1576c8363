"""Laws of a step's operations, each stated once.

An ordinary process asks them of the host's code: torch, NumPy and C++. The processes that
`tests/kernels/test_kernels.py` starts ask them of the Triton kernels, interpreted, with every load
and store checked.
"""

from tests.kernels.conftest import bfloat16_products, memory_checked

__all__ = ["bfloat16_products", "memory_checked"]
