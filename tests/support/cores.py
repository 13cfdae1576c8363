"""What the machine has that some tests need."""

import os

import pytest

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

needs_two_cores = pytest.mark.skipif(
    CORES < 2, reason="two ranks that wait for each other need two CPU cores"
)
