"""Linear layers for few rows on CPUs without bfloat16 instructions."""

import ctypes
from contextlib import nullcontext

import pytest
import torch

from sequoia_vllm import linear_rows as rows_of
from sequoia_vllm.linear_rows import linear_rows, pays_here, suits
from tests.support.builds import for_avx2

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
BLOCKS = 2 * 16384 + 96  # columns: more than the kernel takes at once


@pytest.fixture(params=["here", "avx2"])
def build(request):
    """The kernel as it is compiled here, and for AVX2 alone: its name."""
    rows_of.load_kernel.cache_clear()
    with for_avx2() if request.param == "avx2" else nullcontext():
        yield request.param
    rows_of.load_kernel.cache_clear()


def whole_numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape).to(dtype)


def test_it_is_compiled_for_the_vectors_asked_for(build):
    library = rows_of.load_library(rows_of._SOURCE, "")
    lanes = ctypes.c_int64.in_dll(library, "sequoia_lanes").value
    assert lanes == 8 or (build == "here" and lanes == 16)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("inner", [32, 96, BLOCKS])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_sums_are_exact_and_rounded_once(dtype, has_bias, inner):
    """Sums of whole numbers below 2^24 have no error in float32."""
    torch.manual_seed(inner)
    for outputs, most in ((4, 8), (20, 64), (132, 19)) if inner < BLOCKS else ((20, 7),):
        weight = whole_numbers(dtype, outputs, inner)
        bias = whole_numbers(dtype, outputs) if has_bias else None
        for rows in (*range(most + 1), 130):
            x = whole_numbers(dtype, rows, inner)
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            assert torch.equal(linear_rows(x, weight, bias), exact.to(dtype)), (rows, outputs)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("inner", [320, BLOCKS])
def test_a_row_does_not_depend_on_the_others(dtype, inner):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 32, inner).to(dtype), torch.randn(68, inner).to(dtype)
    together = linear_rows(x, weight, None)
    assert together.shape == (2, 32, 68)
    for rows in range(1, 64) if inner < BLOCKS else (1, 2, 3, 4, 5, 6, 7, 40):
        apart = torch.cat([linear_rows(x, weight, None) for x in x.flatten(0, 1).split(rows)])
        assert torch.equal(together.flatten(0, 1), apart), rows
    exact = x.double() @ weight.double().T
    error = (together - exact).abs().max() / exact.abs().max()
    assert error <= (2**-8 if dtype == BFLOAT16 else 4e-6)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_infinities_and_nans_stay_and_it_is_traced_as_one_operation(dtype):
    x, weight = torch.ones(1, 32).to(dtype), torch.ones(4, 32).to(dtype)
    weight[1, 3], weight[2, 5] = torch.inf, torch.nan
    assert str(linear_rows(x, weight, None).tolist()) == "[[32.0, inf, nan, 32.0]]"
    traced = torch.ops.sequoia_vllm.linear_rows.default
    torch.library.opcheck(traced, (whole_numbers(dtype, 3, 32), whole_numbers(dtype, 4, 32), None))


@pytest.mark.parametrize(
    ("capability", "avx512", "bfloat16", "paying"),
    [
        ("AVX2", False, False, {BFLOAT16, FLOAT32}),
        ("AVX2", True, True, {BFLOAT16, FLOAT32}),
        ("AVX512", True, False, {BFLOAT16}),
        ("AVX512", True, True, set()),
        ("DEFAULT", False, False, set()),
    ],
    ids=["EPYC 1 to 3", "as if", "AVX-512", "bfloat16", "others"],
)
def test_where_it_pays(capability, avx512, bfloat16, paying, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    assert {one for one in (BFLOAT16, FLOAT32, torch.float16) if pays_here(one)} == paying


@pytest.mark.parametrize(
    "weight",
    [
        torch.empty(4, 32).half(), torch.empty(6, 32).bfloat16(), torch.empty(4, 48).bfloat16(),
        torch.empty(32, 4).bfloat16().T, torch.empty(1, 4, 32).bfloat16(),
    ],
    ids=["float16", "outputs", "inner", "transposed", "experts"],
)  # fmt: skip
def test_other_weights_stay_with_vllm(weight):
    assert not suits(weight)
    assert suits(torch.empty(4, 32).bfloat16())
    assert suits(torch.empty(4, 32))
