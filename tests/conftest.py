"""Settings that must be in place before torch and vLLM are imported; which tests come first."""

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import quick_start

# How long an example takes, and its making, depends on what else the machine does.
settings.register_profile(
    "no deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("no deadline")

# One OpenMP thread: the tests' models are tiny, and two spinning threads on a
# busy two-core machine are a hundred times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Reports are nobody's, and what they say of the CPU takes a second to find out.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# On a busy machine a grammar's first expression takes longer than vLLM's five seconds.
os.environ.setdefault("VLLM_REGEX_COMPILATION_TIMEOUT_S", "120")
# What engines learn while tests run is kept nowhere else.
os.environ.setdefault("SEQUOIA_VLLM_TREES", tempfile.mkdtemp(prefix="sequoia-trees-"))
# Of all processes that tests start, unless they have another PYTHONPATH.
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (quick_start.FOLDER, os.environ.get("PYTHONPATH")) if path
)

RAY = "tests/ray"  # and tests/ray_examples
# Minutes each, in processes of their own.
KERNELS = "tests/kernels/test_kernels.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: workers take files in this order, and should end at the same time.

    Those on Ray, which run in shards alone, are one worker's for long.
    """

    def place(item: pytest.Item) -> tuple[bool, int]:
        marked = [item.get_closest_marker(name) is not None for name in ("engine", "slow")]
        is_long = item.nodeid.startswith(KERNELS)
        return not (item.nodeid.startswith(RAY) and all(marked)), -sum(marked) - is_long

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` one worker takes all that use Ray: they share clusters.

    Two clusters with their engines at once would also take twice the memory. Tests of kernels
    share nothing: any worker takes each.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadFilesAndOthers(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(KERNELS):
                return nodeid
            return RAY if nodeid.startswith(RAY) else super()._split_scope(nodeid)

    return LoadFilesAndOthers(config, log)


# Skips that CI's machine may have, by what their reasons begin with. Any other fails there.
MAY_SKIP = (
    "needs a CUDA device",  # CI has no GPU
    "needs AVX-512",  # some of its processors are older
)


def _refuse_to_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fails what was skipped in CI (``CI=true``) for a reason that is not in `MAY_SKIP`."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = f"CI may not skip this: {reason} (see MAY_SKIP in tests/conftest.py)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Refuses skips of tests in CI."""
    report = yield
    _refuse_to_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuses skips of whole files in CI."""
    report = yield
    _refuse_to_skip(report)
    return report


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory whose filesystem has direct I/O: pytest's, or one in the checkout."""
    from sequoia_vllm.engine.offload.weight_file import OffloadError, WeightFile

    with tempfile.TemporaryDirectory(dir=request.config.rootpath, prefix=".disk-") as here:
        for directory in (tmp_path, Path(here)):
            inside = directory / "disk"
            inside.mkdir()
            with suppress(OffloadError):
                WeightFile(inside).close()
                yield inside
                return
        pytest.skip("needs a filesystem with direct I/O")
