"""Linear layers for few rows on CPUs without bfloat16 instructions: see ``linear_rows.cpp``.

A tree's step asks a layer for several rows. vLLM's library takes four times as long for six rows as
for one on such CPUs, so that trees would not pay there. With AVX2 alone the kernel also serves
float32, where vLLM's library takes 1.2 to 1.5 times as long for six rows.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia_vllm.cpp_library import load_library

_SOURCE = Path(__file__).with_suffix(".cpp")
_INNER, _OUTPUTS = 32, 4  # sizes of weights are multiples of them, for the source
_KERNELS = {
    torch.bfloat16: "sequoia_linear_rows_bfloat16", torch.float32: "sequoia_linear_rows_float32",
}  # fmt: skip
# From so many rows on it is faster to widen a whole weight, up to so many values (256 MiB).
_MANY_ROWS, _MOST_WIDENED = 128, 1 << 26


def pays_here(dtype: torch.dtype) -> bool:
    """Whether the kernel serves trees faster than vLLM's library on this CPU, by weights' type.

    ``ATEN_CPU_CAPABILITY=avx2`` makes any x86 CPU one with AVX2 alone, as it does for torch.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return dtype in _KERNELS
    cpu: Any = torch.cpu
    lacks = cpu._is_avx512_supported() and not cpu._is_avx512_bf16_supported()
    return dtype == torch.bfloat16 and lacks


def suits(weight: Tensor) -> bool:
    """Whether the kernel takes this weight."""
    if weight.dtype not in _KERNELS or weight.ndim != 2 or not weight.is_contiguous():
        return False
    return weight.shape[0] % _OUTPUTS == weight.shape[1] % _INNER == 0


@cache
def load_kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    """The kernel for weights of a type, compiled if need be; None where it cannot be (logged)."""
    library = load_library(_SOURCE, "linear layers take longer for trees on this CPU")
    if library is None or dtype not in _KERNELS:
        return None
    found: Any = getattr(library, _KERNELS[dtype])
    found.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 4]
    found.restype = None
    return found


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer, as `torch.nn.functional.linear`, summed in float32.

    It is also an operator, ``torch.ops.sequoia_vllm.linear_rows``, which torch.compile traces.

    Args:
        x: ``[..., K]``.
        weight: bfloat16 or float32 ``[N, K]``, which `suits`. All have its type.
        bias: ``[N]``, or None.

    Returns:
        ``[..., N]``. With fewer than 128 rows none depends on the others.
    """
    outputs, inner = weight.shape
    rows = x.reshape(-1, inner).contiguous()
    if len(rows) >= _MANY_ROWS and weight.numel() <= _MOST_WIDENED:
        wide = None if bias is None else bias.float()
        return torch.nn.functional.linear(x.float(), weight.float(), wide).to(x.dtype)
    result = x.new_empty((*x.shape[:-1], outputs))
    kernel = load_kernel(weight.dtype)
    assert kernel is not None
    kernel(
        rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        result.data_ptr(), len(rows), outputs, inner, torch.get_num_threads(),
    )  # fmt: skip
    return result


_OPERATORS = torch.library.Library("sequoia_vllm", "FRAGMENT")
_OPERATORS.define("linear_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_OPERATORS.impl("linear_rows", linear_rows, "CPU")
torch.library.register_fake(
    "sequoia_vllm::linear_rows",
    lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
    lib=_OPERATORS,
)
