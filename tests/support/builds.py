"""C++ of ours, compiled as on a CPU with AVX2 alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from functools import cache
from unittest.mock import patch

from torch._inductor import config as compiler

from sequoia_vllm.attention.cpu_kernel import load_kernels


@contextmanager
def for_avx2() -> Iterator[None]:
    """Within the block, kernels that load are compiled for AVX2, as by `benchmarks.avx2`."""
    with (
        patch.dict(os.environ, {"ATEN_CPU_CAPABILITY": "avx2"}),
        compiler.patch({"cpp.march": "x86-64-v3"}),
    ):
        yield


@cache
def attention_for_avx2() -> CDLL:
    """The kernels of tree attention and commit as CPUs with AVX2 alone have them."""
    with for_avx2():
        library = load_kernels.__wrapped__()
    assert library is not None
    return library
