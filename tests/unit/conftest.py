"""What one test did is not seen by the next."""

import pytest

from sequoia_vllm.library import selection
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.library.user_files import USER_DIRECTORY_VARIABLE


@pytest.fixture(autouse=True)
def nothing_said():
    """Choices are logged once in a process: here in each test anew."""
    selection._log_once.cache_clear()


@pytest.fixture
def library(tmp_path, monkeypatch) -> TreeLibrary:
    """The shipped trees, and no trees of the user's own; for engines and commands too."""
    monkeypatch.setenv(USER_DIRECTORY_VARIABLE, str(tmp_path / "user"))
    return TreeLibrary()
