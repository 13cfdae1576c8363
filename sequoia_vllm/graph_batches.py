"""Batch sizes that CUDA graphs are captured for besides the schedule's own."""

from collections.abc import Sequence


def powers_of_two(last: int) -> list[int]:
    """1, 2, 4, 8, ..., ``last``."""
    return sorted({*(1 << power for power in range(last.bit_length())), last} - {0})


def half_octaves(last: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ..., ``last``: batches are padded by at most half of their size."""
    powers = powers_of_two(last)
    sizes = {*powers, *(power + power // 2 for power in powers)}
    return sorted(size for size in sizes if size <= last)


def last_with(number: int, by_batch: Sequence[int]) -> int:
    """The largest batch of 1, 2, ... requests that has so many of something, or more; 0: none."""
    reached = (batch for batch, most in enumerate(by_batch, start=1) if most >= number)
    return max(reached, default=0)
