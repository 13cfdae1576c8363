"""The memory checks find what these kernels, each wrong in one way, do; and nothing else."""

import gc

import pytest
import torch
import triton
import triton.language as tl

from tests.support.memory_checks import (
    MemoryCheckError,
    MemoryChecks,
    install,
    memory_checks,
    uninstall,
)


@pytest.fixture(autouse=True)
def checks(memory_checked):
    """Instead of those that `conftest` installs: this module's kernels are its own."""
    uninstall()
    with memory_checks(MemoryChecks(own=(__name__,))) as installed:
        yield installed


@pytest.fixture
def others(checks):
    """This module's kernels are somebody else's: findings are kept and raise nothing."""
    checks.own = ("somebody.else",)
    return checks


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


def test_others_kernels_may_read_all_of_a_storage(others):
    """And no more; what lies outside is not touched, and the launch goes on."""
    read_blocks(TABLES["into a wider table"], masked=False)
    assert not others.findings
    ending = torch.arange(3, dtype=torch.int32)[None]
    assert torch.equal(read_blocks(ending, masked=False), ending)
    assert "read outside of table" in others.report()


@triton.jit
def _double(values, output, size, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    loaded = tl.load(values + place, mask=place < size, other=0.0)
    if MASKED:
        tl.store(output + place, loaded * 2, mask=place < size)
    else:
        tl.store(output + place, loaded * 2)


def test_a_store_without_a_mask(checks):
    memory = torch.full((16,), 7.0)
    output = memory[:6]
    _double[(2,)](torch.arange(6.0), output, 6, 4, True)
    assert memory.tolist() == [0, 2, 4, 6, 8, 10] + [7] * 10
    with pytest.raises(MemoryCheckError, match=r"write outside of output.* byte 24 of 24"):
        _double[(2,)](torch.arange(6.0), output, 6, 4, False)
    assert memory[6:].tolist() == [7] * 10  # found before it was done


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


def test_writers_of_one_value_can_be_named(checks):
    checks.same_value_writers = {"_scatter": "as an example"}
    _scatter[(2,)](torch.tensor([1, 1]), torch.zeros(4, dtype=torch.int32), False)
    assert not checks.findings


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


def test_a_read_that_is_narrower_than_the_write(checks):
    memory = torch.zeros(16, dtype=torch.uint8)
    _wide_write[(2,)](memory.view(torch.int32), memory, 8)
    with pytest.raises(MemoryCheckError, match=r"read conflict of octets: .* byte 7"):
        _wide_write[(2,)](memory.view(torch.int32), memory, 7)


@triton.jit
def _wide_write(words, octets, place):
    if tl.program_id(0) == 0:
        tl.store(words + 1, 1)
    else:
        tl.store(octets + 12, tl.load(octets + place))


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


def test_addresses_of_tensors_that_the_collector_was_told_to_forget(checks):
    tensor = torch.zeros(8)
    gc.freeze()
    try:
        _fill_at[(1,)](torch.tensor([tensor.data_ptr()]), 8, 16)
    finally:
        gc.unfreeze()
    assert tensor.tolist() == list(range(8))


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


@triton.jit
def _first(values):
    return tl.load(values)


@triton.jit
def _through_a_function(values, output):
    tl.store(output, _first(values - 1))


def test_the_error_names_the_kernel_from_inside_a_function(checks):
    with pytest.raises(MemoryCheckError, match=r"^[\w.]+\._through_a_function: read outside"):
        _through_a_function[(1,)](torch.arange(4)[2:], torch.zeros(1))
    # The next launch is checked on its own.
    _shift[(1,)](torch.arange(8), 4)


def test_installing_twice_is_refused_and_uninstalling_restores(checks):
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    with pytest.raises(RuntimeError, match="already"):
        install()
    uninstall()
    assert not hasattr(GridExecutor.__call__, "__wrapped__")
    assert not hasattr(InterpreterBuilder.create_masked_load, "__wrapped__")
    uninstall()
