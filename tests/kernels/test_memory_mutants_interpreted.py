"""The memory checks find what is wrong: in our own kernels, changed in one place each, and here."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sequoia_vllm.kernels import commit
from sequoia_vllm.kernels.modes import GREEDY
from sequoia_vllm.tree import TokenTree
from tests.support.attending import Batch
from tests.support.committing import CONTEXTS, PATHS, random_cache, tables
from tests.support.drawing import draw
from tests.support.memory_checks import MemoryCheckError
from tests.support.mutating import Mutant
from tests.support.verifying import Request, run


def attend():
    batch = Batch([37, 20], [7, 3], heads=(2, 1), dtype=torch.float16, spare_blocks=0)
    # A part of a wider table, as the engine's: its rows do not follow one another.
    batch.table = torch.nn.functional.pad(batch.table, (0, 3))[:, : batch.table.shape[1]]
    batch.run()


def move():
    torch.manual_seed(0)
    caches = [random_cache(25, 3, 16, 8) for _ in range(2)]
    commit.commit_accepted(
        commit.CacheLayers.of(caches),
        block_table=tables(6, 4, 25),
        context_lens=CONTEXTS,
        accepted=PATHS,
    )


def draw_two():
    draw(torch.randn(4, 40), modes=1, counts=[2, 1])


def verify_two():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(2, 9)).astype(np.float32)
    requests = [Request(tokens=[0, 3], logits=logits, target_tokens=[3, 4], mode=GREEDY)] * 2
    run(TokenTree((-1, 0)), requests)


MUTANTS = {
    "block table read past its row": (
        attend, "kernels/tree_attention_kernels.py",
        "position // BLOCK_SIZE, mask=exists, other=0)", "position // BLOCK_SIZE)",
        "read outside of block_table",
    ),
    "attention stores rows that are not there": (
        attend, "kernels/tree_attention_kernels.py",
        "channel[None, :], result, mask=written)", "channel[None, :], result)",
        "write (outside|conflict) of output",
    ),
    "all layers move the first one's tokens": (
        move, "kernels/commit.py",
        "layer = tl.program_id(1)", "layer = tl.program_id(1) * 0",
        "(write|read) conflict of the storage",
    ),
    "tokens moved in more pieces than there are": (
        move, "kernels/commit.py",
        "tl.load(source + offsets, mask=exists), mask=exists)", "tl.load(source + offsets))",
        "conflict of the storage|outside of the storage",
    ),
    "all requests draw into one row": (
        draw_two, "kernels/children_kernels.py",
        "own_tokens = tokens + request.to(tl.int64) * tokens_stride", "own_tokens = tokens",
        "write conflict of tokens",
    ),
    "all requests count in one place": (
        verify_two, "kernels/verify_kernels.py",
        "tl.store(num_sampled + request, depth)", "tl.store(num_sampled, depth)",
        "write conflict of num_sampled",
    ),
    "one token more than the path has columns": (
        verify_two, "kernels/verify_kernels.py",
        "(column < path_columns)", "(column < columns)",
        "write (outside|conflict) of accepted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_our_kernels_are_caught(name, tmp_path):
    call, *changed, message = MUTANTS[name]
    call()
    with (
        Mutant(*changed, check=message).applied(tmp_path),
        pytest.raises(MemoryCheckError, match=message),
    ):
        call()


# -- what no change of our kernels shows ------------------------------------------------------


@pytest.fixture
def checks(memory_checked):
    memory_checked.own = __name__
    return memory_checked


@triton.jit
def _shift(values, step):
    """Each program moves its value on: where another one reads, unless in a wide step."""
    program = tl.program_id(0)
    tl.store(values + program + step, tl.load(values + program))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_program_reads_what_another_one_writes(checks, seed):
    """Whichever of the two runs first."""
    checks.seed = seed
    _shift[(4,)](torch.arange(8), 4)
    _shift[(4,)](torch.arange(8), 0)  # reads and writes its own
    with pytest.raises(MemoryCheckError, match="read conflict of values: program"):
        _shift[(4,)](torch.arange(8), 1)


@triton.jit
def _two_widths(words, octets, place):
    if tl.program_id(0) == 0:
        tl.store(words, 1)
    else:
        tl.store(octets + place, 1)


def test_conflicts_between_accesses_of_different_widths(checks):
    memory = torch.zeros(16, dtype=torch.uint8)
    _two_widths[(2,)](memory.view(torch.int32), memory, 4)
    with pytest.raises(MemoryCheckError, match="write conflict"):
        _two_widths[(2,)](memory.view(torch.int32), memory, 3)


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
    # GPUs refuse such an access; the interpreter and CPUs do not mind.
    with pytest.raises(MemoryCheckError, match="misaligned write of the storage"):
        _fill_at[(1,)](addresses + 2, 4, 16)
    gone = torch.zeros(1 << 20)  # large: nothing else is soon at its address
    addresses = torch.tensor([gone.data_ptr()])
    del gone
    with pytest.raises(MemoryCheckError, match="where no live tensor is"):
        _fill_at[(1,)](addresses, 8, 16)


@triton.jit
def _count(output):
    tl.atomic_add(output, 1)


def test_atomic_operations_are_not_followed(checks):
    with pytest.raises(MemoryCheckError, match="atomic"):
        _count[(3,)](torch.zeros(1, dtype=torch.int32))
