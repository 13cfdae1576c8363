"""Where the time of steps goes, alike for every method."""

from __future__ import annotations

from collections.abc import Sequence

from sequoia_vllm.hardware.step_curves import StepRecord

PARTS = ("target", "draft", "drawing", "verify")


def part_seconds(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of each of `PARTS`, and the number of "steps"."""
    return {
        "target": sum(step.target for step in steps),
        "draft": sum(step.drafting - step.drawing for step in steps),
        "drawing": sum(step.drawing for step in steps),
        "verify": sum(step.sampling for step in steps),
        "steps": len(steps),
    }
