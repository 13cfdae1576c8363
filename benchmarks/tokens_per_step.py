"""How many tokens a step brought, and how exactly that is known."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any


def tokens_per_step(runs: list[Any]) -> str:
    """Mean of these rounds (`RoundRun`) together, with twice the standard error over steps."""
    tokens = [number for run in runs for number in run.steady.step_tokens]
    error = 2 * stdev(tokens) / len(tokens) ** 0.5
    return f"{fmean(tokens):.2f} +- {error:.2f} tokens per step"
