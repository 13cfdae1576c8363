"""What one test did is not seen by the next."""

import pytest

from sequoia_vllm.library import selection


@pytest.fixture(autouse=True)
def nothing_said():
    """Choices are logged once in a process: here in each test anew."""
    selection._log_once.cache_clear()
