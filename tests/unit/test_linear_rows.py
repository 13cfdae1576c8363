"""Linear layers for few rows on CPUs without bfloat16 instructions."""

import pytest
import torch

from sequoia_vllm.linear_rows import linear_rows, suits


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape).bfloat16()


@pytest.mark.parametrize("inner", [48, 2 * 16384 + 48], ids=["", "blocks"])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 13, 130])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_sums_are_exact_and_rounded_once(rows, has_bias, inner):
    """Sums of whole numbers below 2^24 have no error in float32."""
    torch.manual_seed(rows)
    x, weight = whole_numbers(rows, inner), whole_numbers(20, inner)
    bias = whole_numbers(20) if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert torch.equal(linear_rows(x, weight, bias), exact.bfloat16())


@pytest.mark.parametrize("inner", [320, 16384 + 320], ids=["", "blocks"])
def test_a_row_does_not_depend_on_the_others(inner):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 17, inner).bfloat16(), torch.randn(64, inner).bfloat16()
    together = linear_rows(x, weight, None)
    apart = torch.stack([linear_rows(row, weight, None) for row in x.flatten(0, 1)])
    assert together.shape == (2, 17, 64)
    assert torch.equal(together.flatten(0, 1), apart)
    exact = x.double() @ weight.double().T
    assert (together - exact).abs().max() <= exact.abs().max() * 2**-8


def test_infinities_and_nans_stay_and_it_is_traced_as_one_operation():
    x, weight = torch.ones(1, 16).bfloat16(), torch.ones(4, 16).bfloat16()
    weight[1, 3], weight[2, 5] = torch.inf, torch.nan
    assert str(linear_rows(x, weight, None).tolist()) == "[[16.0, inf, nan, 16.0]]"
    traced = torch.ops.sequoia_vllm.linear_rows.default
    torch.library.opcheck(traced, (whole_numbers(3, 16), whole_numbers(4, 16), None))


@pytest.mark.parametrize(
    "weight",
    [
        torch.empty(4, 16), torch.empty(6, 16).bfloat16(), torch.empty(4, 24).bfloat16(),
        torch.empty(16, 4).bfloat16().T, torch.empty(1, 4, 16).bfloat16(),
    ],
    ids=["float32", "outputs", "inner", "transposed", "experts"],
)  # fmt: skip
def test_other_weights_stay_with_vllm(weight):
    assert not suits(weight)
    assert suits(torch.empty(4, 16).bfloat16())
