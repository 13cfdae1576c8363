"""Medians of recorded steps, in milliseconds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

PARTS = ("target", "sampling", "drafting")
"""Spans of a step on the device: the target's pass and LM head; verification and commit; growth."""
Record = dict[str, Any]


@dataclass(frozen=True)
class StepTimes:
    """Medians of steps of one kind, milliseconds.

    Attributes:
        step_ms: From one step's start to the next one's, by the host's clock.
        target_ms, sampling_ms, drafting_ms: Spans of the step on the device, see `PARTS`.
    """

    steps: int
    step_ms: float
    target_ms: float
    sampling_ms: float
    drafting_ms: float
    gaps_ms: float
    passes: int


def times_of(
    records: Sequence[Record],
    is_wanted: Callable[[Record], bool],
    is_next_wanted: Callable[[Record], bool] | None = None,
) -> StepTimes:
    """Times of the steps that are wanted.

    Args:
        is_next_wanted: What the step after it must be; None: any.
    """
    found = [
        (record, following["start"] - record["start"])
        for record, following in pairwise(records)
        if is_wanted(record) and (is_next_wanted is None or is_next_wanted(following))
    ]
    if not found:
        raise ValueError(f"none of {len(records)} steps is of the kind wanted: {_kinds(records)}")
    step = 1e3 * median(seconds for _, seconds in found)
    target, sampling, drafting = (
        1e3 * median(record[part] for record, _ in found) for part in PARTS
    )
    passes = int(median(len(record["passes"]) for record, _ in found))
    gaps = step - target - sampling - drafting
    return StepTimes(len(found), step, target, sampling, drafting, gaps, passes)


def steady(batch: int, size: int) -> Callable[[Record], bool]:
    """Whether ``batch`` requests, and no other, have ``size`` tokens each and read no prompt."""

    def is_wanted(record: Record) -> bool:
        found = (record["requests"], record["fewest"], record["most"])
        return bool(record["decoding"]) and found == (batch, size, size)

    return is_wanted


def rounded(times: StepTimes) -> dict[str, float]:
    """The times as they are written: to a tenth of a microsecond."""
    return {name: round(value, 4) for name, value in asdict(times).items()}


def compact(records: Iterable[Record]) -> list[Record]:
    """Records as they are written: seconds to a tenth of a microsecond."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 7)
        return [short(one) for one in value] if isinstance(value, (list, tuple)) else value

    return [{name: short(value) for name, value in record.items()} for record in records]


def _kinds(records: Iterable[Record]) -> str:
    keys = ("requests", "fewest", "most", "decoding")
    kinds = sorted({str([record[key] for key in keys]) for record in records})
    return f"{', '.join(keys)}: {' '.join(kinds[:8])}"
