"""Times the tree optimizer, and its memory, against what it may cost on one core.

python -m benchmarks.optimizer
"""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass

from sequoia_vllm.tree.optimize import optimize_tree
from sequoia_vllm.tree.published import REFERENCE_ACCEPTANCE


@dataclass(frozen=True)
class Problem:
    """A search for a tree, and the most it may cost on one core."""

    size: int
    max_depth: int
    branches: int
    limit_seconds: float
    limit_mib: float


PROBLEMS = (Problem(128, 10, 32, 0.05, 1024), Problem(1024, 32, 32, 5.0, 1024))


def cost_of(problem: Problem, runs: int = 3) -> tuple[float, float]:
    """Searches ``runs`` times, and once more to see the memory.

    Returns:
        Seconds of the fastest run, building and ordering the tree included; and the most memory
        allocated at once, MiB.
    """
    limits = problem.size, problem.max_depth, problem.branches
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        optimize_tree(REFERENCE_ACCEPTANCE, *limits)
        times.append(time.perf_counter() - start)
    tracemalloc.start()
    try:
        optimize_tree(REFERENCE_ACCEPTANCE, *limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return min(times), peak / 2**20


def main() -> None:
    """Prints a line for each problem."""
    for problem in PROBLEMS:
        seconds, mib = cost_of(problem)
        print(
            f"size {problem.size}, depth {problem.max_depth}, {problem.branches} branches: "
            f"{1e3 * seconds:.1f} ms (limit {1e3 * problem.limit_seconds:.0f}), "
            f"peak {mib:.1f} MiB (limit {problem.limit_mib:.0f})"
        )


if __name__ == "__main__":
    main()
