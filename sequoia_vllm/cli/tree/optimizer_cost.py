"""Time and memory of the optimizer of trees: what `sequoia-vllm tree bench` shows."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import asdict, dataclass

from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.optimize import optimize_tree


@dataclass(frozen=True)
class BenchCase:
    """A problem and the most it may cost on one core."""

    size: int
    max_depth: int
    branches: int
    limit_seconds: float
    limit_mib: float


@dataclass(frozen=True)
class BenchResult:
    """What one problem cost.

    Attributes:
        seconds: Fastest of the runs, tree building and ordering included.
        peak_mib: Most memory allocated at once, in another run.
        expected_tokens: Of the tree found.
    """

    size: int
    max_depth: int
    branches: int
    seconds: float
    peak_mib: float
    expected_tokens: float
    limit_seconds: float
    limit_mib: float

    def to_dict(self) -> dict[str, float]:
        """As a JSON object."""
        return asdict(self)


CASES = (BenchCase(128, 10, 32, 0.05, 1024), BenchCase(1024, 32, 32, 5.0, 1024))


def bench_case(case: BenchCase, acceptance: Acceptance, runs: int = 3) -> BenchResult:
    """Optimises one tree ``runs`` times, and once more to see the memory."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        tree = optimize_tree(acceptance, case.size, case.max_depth, case.branches)
        times.append(time.perf_counter() - start)
    tracemalloc.start()
    try:
        optimize_tree(acceptance, case.size, case.max_depth, case.branches)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return BenchResult(
        case.size, case.max_depth, case.branches, min(times), peak / 2**20,
        tree.expected_tokens(acceptance), case.limit_seconds, case.limit_mib,
    )  # fmt: skip
