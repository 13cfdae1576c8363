"""The memory checks find what these kernels, each wrong in one way, do; and nothing else.

What mutants of our own kernels do is in `test_memory_mutants_interpreted.py`.
"""

import pytest
import torch
import triton
import triton.language as tl

from tests.support.memory_checks import MemoryCheckError, MemoryChecks, memory_checks, uninstall


@pytest.fixture(autouse=True)
def checks(memory_checked):
    """Instead of those that `conftest` installs: this module's kernels are its own."""
    uninstall()
    with memory_checks(MemoryChecks(own=(__name__,))) as installed:
        yield installed


@triton.jit
def _count(slots, output):
    program = tl.program_id(0)
    tl.atomic_add(output + tl.load(slots + program), program)


def test_several_atomic_operations_on_one_slot_are_no_conflict(checks):
    output = torch.zeros(4, dtype=torch.int32)
    _count[(3,)](torch.tensor([2, 2, 2]), output)
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
