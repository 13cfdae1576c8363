"""The tests' interpreter (`quicker_types`) still checks what Triton's does."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def broadcast_kernel(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds up a row and a column, of integers and of half numbers."""
    row, column = tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    places = column[:, None] * COLUMNS + row[None, :]
    values = tl.load(source + row)[None, :] + column[:, None]
    tl.store(target + places, values)


@triton.jit
def mismatched_kernel(target):
    tl.store(target + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


@triton.jit
def odd_kernel(target, SIZE: tl.constexpr):
    tl.store(target, tl.sum(tl.full((SIZE,), 1, tl.int32)))


@triton.jit
def types_kernel(target, half):
    value = tl.load(half)
    tl.static_assert(value.dtype == tl.float16)
    tl.static_assert((value + 1).dtype == tl.float16)
    tl.static_assert((value[None] + tl.arange(0, 1)).dtype == tl.float16)
    tl.static_assert((tl.arange(0, 4) + tl.full((4,), 1, tl.int64)).dtype == tl.int64)
    tl.static_assert((tl.arange(0, 4) + 1).dtype == tl.int32)
    tl.static_assert((tl.arange(0, 4) * 0.5).dtype == tl.float32)
    tl.static_assert((tl.arange(0, 4) / 2).dtype == tl.float32)
    tl.static_assert(str(tl.arange(0, 4).type) == str(tl.full((4,), 1, tl.int32).type))
    tl.static_assert(tl.arange(0, 4).type != tl.full((4,), 1, tl.int64).type)
    tl.static_assert(tl.arange(0, 4).type != tl.arange(0, 8).type)
    tl.store(target, value.to(tl.float32))


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (4, 4)])
def test_shapes_in_turn(shape):
    rows, columns = shape
    source = torch.arange(columns, dtype=torch.float16) / 2
    target = torch.zeros(shape, dtype=torch.float16)
    broadcast_kernel[(1,)](source, target, rows, columns)
    assert torch.equal(target, source[None, :] + torch.arange(rows)[:, None])


@pytest.mark.parametrize("attempt", range(2))
def test_types_of_results(attempt):
    target = torch.zeros(1)
    types_kernel[(1,)](target, torch.full((1,), 1.5, dtype=torch.float16))
    assert target.item() == 1.5


@pytest.mark.parametrize("attempt", range(2))
def test_wrong_shapes_are_refused_each_time(attempt):
    target = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(Exception, match="incompatible dimensions"):
        mismatched_kernel[(1,)](target)
    odd_kernel[(1,)](target, 4)
    assert target[0] == 4
    with pytest.raises(Exception, match="power of 2"):
        odd_kernel[(1,)](target, 3)
    with pytest.raises(Exception, match="constexpr"):
        odd_kernel[(1,)](target, 4.0)
