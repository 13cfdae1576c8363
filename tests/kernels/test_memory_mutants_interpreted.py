"""The project's own kernels, changed in one place each: the memory checks find what is wrong."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sequoia_vllm.kernels import (
    children,
    children_kernels,
    commit,
    tree_attention,
    tree_attention_kernels,
    verify,
    verify_kernels,
)
from sequoia_vllm.kernels.modes import GREEDY
from tests.support.attending import Batch
from tests.support.committing import CONTEXTS, PATHS, random_cache, tables
from tests.support.drawing import draw
from tests.support.memory_checks import MemoryCheckError
from tests.support.verifying import Request, Tree, run


def mutant_of(module, old, new, directory):
    """The module with one piece of its source replaced, which must be there once."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{source.count(old)} of {old!r}"
    file = directory / f"{module.__name__.rpartition('.')[2]}_mutant.py"
    file.write_text(source.replace(old, new))
    name = f"{module.__name__}_mutant"
    specification = importlib.util.spec_from_file_location(name, file)
    mutant = importlib.util.module_from_spec(specification)
    sys.modules[name] = mutant  # dataclasses look themselves up
    specification.loader.exec_module(mutant)
    return mutant


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
    run(Tree([-1, 0]), requests)


MUTANTS = {
    "block table read past its row": (
        attend, tree_attention_kernels, tree_attention, "tree_attention_kernel",
        "position // BLOCK_SIZE, mask=exists, other=0)", "position // BLOCK_SIZE)",
        "read outside of block_table",
    ),
    "attention stores rows that are not there": (
        attend, tree_attention_kernels, tree_attention, "tree_attention_kernel",
        "channel[None, :], result, mask=written)", "channel[None, :], result)",
        "write (outside|conflict) of output",
    ),
    "all layers move the first one's tokens": (
        move, commit, commit, "commit_kernel",
        "layer = tl.program_id(1)", "layer = tl.program_id(1) * 0",
        "(write|read) conflict of the storage",
    ),
    "tokens moved in more pieces than there are": (
        move, commit, commit, "commit_kernel",
        "tl.load(source + offsets, mask=exists), mask=exists)", "tl.load(source + offsets))",
        "conflict of the storage|outside of the storage",
    ),
    "all requests draw into one row": (
        draw_two, children_kernels, children, "merge_best_kernel",
        "own_tokens = tokens + request.to(tl.int64) * tokens_stride", "own_tokens = tokens",
        "write conflict of tokens",
    ),
    "all requests count in one place": (
        verify_two, verify_kernels, verify, "verify_kernel",
        "tl.store(num_sampled + request, depth)", "tl.store(num_sampled, depth)",
        "write conflict of num_sampled",
    ),
    "one token more than the path has columns": (
        verify_two, verify_kernels, verify, "verify_kernel",
        "(column < path_columns)", "(column < columns)",
        "write (outside|conflict) of accepted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_our_kernels_are_caught(name, memory_checked, monkeypatch, tmp_path):
    call, module, user, kernel, old, new, message = MUTANTS[name]
    call()
    mutant = mutant_of(module, old, new, tmp_path)
    monkeypatch.setattr(user, kernel, getattr(mutant, kernel))
    with pytest.raises(MemoryCheckError, match=message):
        call()
    memory_checked.findings.clear()
