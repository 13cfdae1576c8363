"""Every kernel compiles for the GPUs we name, keeps to registers and fits shared memory.

The page of tests/kernels/compiled has all variants with the Triton that tests install, and hashes
of the sources that gave them. So here each kernel is compiled once only, to see that it gives what
the page has. It runs in a process of its own, as Triton compiles nothing where TRITON_INTERPRET is
set.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402 (after the import may skip)

from benchmarks.compiled.pages import Page, line  # noqa: E402
from benchmarks.compiled.sources import source_hash, source_hashes  # noqa: E402
from benchmarks.compiled.variant import (  # noqa: E402
    CAPABILITIES,
    SHARED_MEMORY_LIMITS,
    Variant,
)
from benchmarks.compiled.variants import all_tasks, all_variants, sample_tasks  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "tests" / "kernels" / "compiled"
VERSION = importlib.metadata.version("triton")


def names(tasks):
    return [(variant.name, capability) for variant, capability in tasks]


# -- what is compiled ----------------------------------------------------------------


def test_every_variant_is_compiled_for_some_device():
    for variant in all_variants():
        assert variant.capabilities, variant.name
        assert set(variant.capabilities) <= set(CAPABILITIES)


def test_the_sample_has_every_kernel_and_every_device():
    kernels = {variant.kernel.__name__ for variant in all_variants()}
    assert [variant.kernel.__name__ for variant, _ in sample_tasks()] == list(source_hashes())
    assert set(source_hashes()) == kernels
    assert len(kernels) >= 7
    assert {capability for _, capability in sample_tasks()} == set(CAPABILITIES)


@pytest.mark.slow
@pytest.mark.sharded
def test_kernels_compile_to_what_their_page_has(tmp_path):
    # Nothing that was compiled before is taken: here it is to be compiled.
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.compiled", "--sample", "--processes", "1"]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    recorded = {(row.name, row.capability): row for row in Page.read(PAGES, VERSION).table}
    expected = [line(recorded[name]) for name in names(sample_tasks())]
    assert done.stdout.splitlines() == expected


# -- the page ------------------------------------------------------------------------

# Bytes at most. Its sixteen warps have 128 registers per thread; on an H100 they were
# quicker than eight without spills, also where they spilled 80 bytes.
# Two of the planned attention's variants spill little; no GPU has timed them.
SPILLED = {
    "verify": 160,
    "tree_attention bf16 on bf16, head 96/4, block 16, 8 words: 128 x 32, planned": 8,
    "tree_attention bf16 on bf16, head 128/4, block 16, 2 words: 64 x 32, window, planned": 40,
}


def test_the_page_is_of_the_present_kernels():
    stale = Page.read(PAGES, VERSION).stale(source_hashes())
    assert not stale, f"changed since they were recorded: {stale}. Run `make compiled`"


def test_the_page_has_every_variant_and_no_device_refuses_one():
    page = Page.read(PAGES, VERSION)
    assert [(row.name, row.capability) for row in page.table] == names(all_tasks())
    limits = SHARED_MEMORY_LIMITS
    refused = [
        row
        for row in page.table
        if row.spilled_bytes > SPILLED.get(row.name, SPILLED.get(row.name.split()[0], 0))
        or row.shared_bytes > limits[row.capability]
    ]
    assert refused == []


# -- hashes of sources ---------------------------------------------------------------

FACTOR = tl.constexpr(2)


@triton.jit
def scaled(value):
    return value * FACTOR


@triton.jit
def kernel(pointer, number):
    tl.store(pointer, scaled(number))  # at its place


def hash_of(types="i32", **launch):
    signature = {"pointer": "*i32", "number": types}
    return source_hash([Variant("a kernel", kernel, signature, **launch)])


def test_hash_is_of_what_a_kernel_calls_and_names_and_of_its_launches(monkeypatch):
    hashes = [hash_of(), hash_of(types="i64"), hash_of(num_warps=8), hash_of(capabilities=(90,))]
    monkeypatch.setitem(scaled.fn.__globals__, "FACTOR", tl.constexpr(3))
    hashes.append(hash_of())
    monkeypatch.setitem(kernel.fn.__globals__, "scaled", kernel)
    hashes.append(hash_of())
    assert len(set(hashes)) == len(hashes)
