"""C++ of ours, compiled as on a CPU with AVX2 alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch._inductor import config as compiler


@contextmanager
def for_avx2() -> Iterator[None]:
    """Within the block, kernels that load are compiled for AVX2, as by `benchmarks.avx2`."""
    with (
        patch.dict(os.environ, {"ATEN_CPU_CAPABILITY": "avx2"}),
        compiler.patch({"cpp.march": "x86-64-v3"}),
    ):
        yield
