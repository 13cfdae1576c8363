"""Tests of the kernels alone; `tests/ops` has the laws that the host's code obeys, too.

Those in `test_*_interpreted.py` run in processes whose Triton interprets kernels, which
test_kernels.py starts; all others run where it compiles them.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.support import memory_checks
from tests.support.quicker import interpret_quickly

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    interpret_quickly()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignores the others; None: nothing is said about this path."""
    name = collection_path.stem
    is_other = name.startswith("test_") and name.endswith("_interpreted") != INTERPRETED
    return True if is_other else None


@pytest.fixture(autouse=True)
def memory_checked():
    """Kernels touch only what they were given, and their programs run in any order."""
    checks = memory_checks.MemoryChecks()
    checked = INTERPRETED and memory_checks.wanted()
    restore = memory_checks.install(checks) if checked else lambda: None
    yield checks
    restore()


@pytest.fixture
def bfloat16_by_default():
    """As while vLLM loads a model in bfloat16: buffers that are made meanwhile must not care."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def bfloat16_products(monkeypatch):
    """The interpreter multiplies the bit patterns of bfloat16: give it their values instead."""
    if not INTERPRETED:
        return
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def exact(handle):
        if handle.dtype.scalar != bfloat16:
            return handle
        bits = handle.data.astype("uint32") << 16
        return TensorHandle(bits.view("float32"), float32)

    def patched(self, a, b, *rest):
        return create_dot(self, exact(a), exact(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", patched)


@pytest.fixture
def lanes(request, monkeypatch):
    """Of the verifier; traversal's tokens per program, too: rows of several parts, or of one."""
    from sequoia_vllm.kernels import traversal, verify

    size = getattr(request, "param", 4)
    monkeypatch.setattr(verify, "_FEWEST_LANES", size)
    monkeypatch.setattr(traversal, "_PART", size)
    return size
