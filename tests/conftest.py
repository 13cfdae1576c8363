"""Settings that must be in place before torch and vLLM are imported."""

import os

import pytest

from tests import quick_start

# One OpenMP thread: the tests' models are tiny, and two spinning threads on a
# busy two-core machine are a hundred times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Of all processes that tests start, unless they have another PYTHONPATH.
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (quick_start.FOLDER, os.environ.get("PYTHONPATH")) if path
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: workers take files in this order, and should end at the same time."""

    def place(item: pytest.Item) -> int:
        return 2 - bool(item.get_closest_marker("engine")) - bool(item.get_closest_marker("slow"))

    items.sort(key=place)
