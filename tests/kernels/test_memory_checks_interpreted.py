"""The memory checks find what these kernels, each wrong in one way, do; and nothing else."""

import pytest
import torch
import triton
import triton.language as tl

from tests.support.memory_checks import (
    MemoryCheckError,
    MemoryChecks,
    memory_checks,
    uninstall,
)


@pytest.fixture(autouse=True)
def checks(memory_checked):
    """Instead of those that `conftest` installs: this module's kernels are its own."""
    uninstall()
    with memory_checks(MemoryChecks(own=(__name__,))) as installed:
        yield installed


@triton.jit
def _read_blocks(table, table_stride, output, MASKED: tl.constexpr):
    """Copies rows of three block numbers, in blocks of four."""
    row = tl.program_id(0)
    column = tl.arange(0, 4)
    exists = column < 3
    read = exists if MASKED else column >= 0
    block = tl.load(table + row * table_stride + column, mask=read, other=0)
    tl.store(output + row * 3 + column, block, mask=exists)


def read_blocks(table, masked):
    output = torch.zeros(len(table), 3, dtype=torch.int32)
    _read_blocks[(len(table),)](table, table.stride(0), output, masked)
    return output


TABLES = {
    "into nothing": torch.arange(3, dtype=torch.int32)[None],
    "into a wider table": torch.arange(16, dtype=torch.int32).view(2, 8)[:, :3],
    "into another tensor": torch.arange(64, dtype=torch.int32)[8:11][None],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_block_table_is_read_past_its_row(checks, name):
    table = TABLES[name]
    assert torch.equal(read_blocks(table, masked=True), table)
    with pytest.raises(MemoryCheckError, match="_read_blocks: read outside of table: 4 bytes"):
        read_blocks(table, masked=False)


@triton.jit
def _scatter(slots, output, ATOMIC: tl.constexpr):
    program = tl.program_id(0)
    slot = tl.load(slots + program)
    if ATOMIC:
        tl.atomic_add(output + slot, program)
    else:
        tl.store(output + slot, program)


def test_two_programs_write_one_slot(checks):
    output = torch.zeros(4, dtype=torch.int32)
    _scatter[(3,)](torch.tensor([2, 0, 3]), output, False)
    assert output.tolist() == [1, 0, 0, 2]
    with pytest.raises(MemoryCheckError, match=r"write conflict of output: program .* byte 8"):
        _scatter[(3,)](torch.tensor([2, 0, 2]), output, False)


def test_several_atomic_operations_on_one_slot_are_none(checks):
    output = torch.zeros(4, dtype=torch.int32)
    _scatter[(3,)](torch.tensor([2, 2, 2]), output, True)
    assert output.tolist() == [0, 0, 3, 0]


@triton.jit
def _shift(values, step):
    """Each program moves its value on: where another one reads, unless in a wide step."""
    program = tl.program_id(0)
    tl.store(values + program + step, tl.load(values + program))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_program_reads_what_another_one_writes(checks, seed):
    """Whichever of the two runs first."""
    checks.shuffle_seed = seed
    _shift[(4,)](torch.arange(8), 4)
    _shift[(4,)](torch.arange(8), 0)  # reads and writes its own
    with pytest.raises(MemoryCheckError, match="read conflict of values: program"):
        _shift[(4,)](torch.arange(8), 1)


def test_conflicts_between_accesses_of_different_widths(checks):
    memory = torch.zeros(16, dtype=torch.uint8)
    _two_widths[(2,)](memory.view(torch.int32), memory, 4)
    with pytest.raises(MemoryCheckError, match="write conflict"):
        _two_widths[(2,)](memory.view(torch.int32), memory, 3)


@triton.jit
def _two_widths(words, octets, place):
    if tl.program_id(0) == 0:
        tl.store(words, 1)
    else:
        tl.store(octets + place, 1)


@triton.jit
def _record_order(output, counter):
    tl.store(output + tl.program_id(0) * 3 + tl.program_id(1), tl.atomic_add(counter, 1))


def test_programs_run_in_a_shuffled_order(checks):
    orders = []
    for seed in (None, 0, 0, 1):
        checks.shuffle_seed = seed
        checks.launches.clear()
        output = torch.zeros(4, 3, dtype=torch.int32)
        _record_order[(4, 3)](output, torch.zeros(1, dtype=torch.int32))
        orders.append(output.flatten().tolist())
        assert sorted(orders[-1]) == list(range(12))  # each runs once
    plain, first, again, other = orders
    assert plain == list(range(12))
    assert first == again
    assert first not in (plain, other)


@triton.jit
def _fill_at(addresses, size, BLOCK: tl.constexpr):
    """Writes like kernels that are given a table of addresses."""
    base = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, BLOCK)
    tl.store(base + place, place.to(tl.float32), mask=place < size)


def test_addresses_in_a_table(checks):
    tensors = [torch.zeros(8), torch.zeros(8)]
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors])
    _fill_at[(2,)](addresses, 8, 16)
    assert torch.stack(tensors).tolist() == [list(range(8))] * 2
    with pytest.raises(MemoryCheckError, match=r"write outside of the storage .* byte 32 of 32"):
        _fill_at[(2,)](addresses, 9, 16)


def test_an_address_that_is_not_a_multiple_of_the_width(checks):
    """GPUs refuse such an access; the interpreter and CPUs do not mind."""
    tensor = torch.zeros(8)
    with pytest.raises(MemoryCheckError, match="misaligned write of the storage"):
        _fill_at[(1,)](torch.tensor([tensor.data_ptr() + 2]), 4, 16)


def test_an_address_of_memory_that_was_freed(checks):
    gone = torch.zeros(8)
    addresses = torch.tensor([gone.data_ptr()])
    _fill_at[(1,)](addresses, 8, 16)
    del gone
    with pytest.raises(MemoryCheckError, match="where no live tensor is"):
        _fill_at[(1,)](addresses, 8, 16)
