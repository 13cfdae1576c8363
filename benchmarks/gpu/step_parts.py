"""Medians of recorded steps, in milliseconds."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

PARTS = ("target", "sampling", "drafting")
"""Spans of a step on the device: the target's pass and LM head; verification and commit; growth."""
Record = dict[str, Any]


def times_of(
    records: Sequence[Record],
    is_wanted: Callable[[Record], bool],
    is_next_wanted: Callable[[Record], bool] | None = None,
) -> dict[str, float]:
    """Medians of the steps that are wanted, milliseconds to a tenth of a microsecond.

    Args:
        is_next_wanted: What the step after it must be; None: any.

    Returns:
        "steps": how many; "step_ms": from one step's start to the next one's, by the host's clock;
        "target_ms" and so on: spans of the step on the device, see `PARTS`; "gaps_ms": the rest;
        "passes": the draft's.

    Raises:
        ValueError: No step is wanted.
    """
    found = [
        (record, following["start"] - record["start"])
        for record, following in pairwise(records)
        if is_wanted(record) and (is_next_wanted is None or is_next_wanted(following))
    ]
    if not found:
        raise ValueError(f"none of {len(records)} steps is of the kind wanted: {_kinds(records)}")
    step = 1e3 * median(seconds for _, seconds in found)
    parts = {f"{part}_ms": 1e3 * median(record[part] for record, _ in found) for part in PARTS}
    times = {"step_ms": step, **parts, "gaps_ms": step - sum(parts.values())}
    return {
        "steps": len(found),
        **{name: round(value, 4) for name, value in times.items()},
        "passes": int(median(len(record["passes"]) for record, _ in found)),
    }


def steady(batch: int, size: int) -> Callable[[Record], bool]:
    """Whether ``batch`` requests, and no other, have ``size`` tokens each and read no prompt."""

    def is_wanted(record: Record) -> bool:
        found = (record["requests"], record["fewest"], record["most"])
        return bool(record["decoding"]) and found == (batch, size, size)

    return is_wanted


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
