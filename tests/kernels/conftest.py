"""These tests run in a process whose Triton interprets kernels: see tests/unit/test_kernels.py."""

import os

import pytest

from tests.gpu_rehearsal import memory_checks
from tests.quicker import interpret_quickly

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*"]
if INTERPRETED:
    interpret_quickly()


@pytest.fixture(autouse=True)
def memory_checked():
    """Kernels touch only what they were given, and their programs run in any order."""
    if not INTERPRETED or not memory_checks.wanted():
        yield None
        return
    with memory_checks.memory_checks() as checks:
        yield checks
    assert not checks.findings, checks.report()
