"""Tests of the Triton kernels.

Those in `test_*_interpreted.py` run in processes whose Triton interprets kernels, which
test_kernels.py starts; all others run where it compiles them.
"""

import os

import pytest

from tests.support import memory_checks
from tests.support.quicker import interpret_quickly

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = ["test_kernel*"] if INTERPRETED else ["test_*_interpreted.py"]
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
