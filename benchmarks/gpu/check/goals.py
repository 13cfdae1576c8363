"""The project's goals on one H200, and whether they were reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from benchmarks.gpu.check import step_times, verification_times
from benchmarks.gpu.check.report import Goal, GpuCheckReport, PartTime, StageReport

_BANDWIDTH_PERCENT = 70.0
_BANDWIDTH_CONTEXT, _BANDWIDTH_NODES = 8192, 64
_STEP_RATIO = 1.15
_LEVEL_MILLISECONDS = 0.25
_VERIFY_MILLISECONDS = 0.15
_PREDICTED_PERCENT = 90.0


def judge(report: GpuCheckReport) -> list[Goal]:
    """The goals of which something was measured."""
    if report.interpreted:
        return []
    found: list[Goal] = []
    for name, goals in (("kernels", _of_kernels), ("steps", _of_steps), ("engine", _of_engine)):
        if name in report.stages:
            found += goals(report.stages[name])
    return found


def _goal(
    name: str, measured: float, limit: float, bound: Literal["at most", "at least"], unit: str
) -> Goal:
    met = measured <= limit if bound == "at most" else measured >= limit
    return Goal(name, measured, limit, bound, unit, met)


def _of_kernels(stage: StageReport) -> Iterator[Goal]:
    for time in stage.attention:
        if (time.context_length, time.nodes) == (_BANDWIDTH_CONTEXT, _BANDWIDTH_NODES):
            yield _goal(
                f"tree attention {time.shape}, {time.cache_dtype} cache, batch {time.batch_size}, "
                f"{time.nodes} nodes, context {time.context_length}: of copy bandwidth",
                100 * time.share_of_bandwidth, _BANDWIDTH_PERCENT, "at least", "%",
            )  # fmt: skip
    walks = [
        time.seconds
        for part in (verification_times.ACCEPTED, verification_times.REJECTED)
        for time in _parts(stage, part)
        if (time.batch_size, time.vocabulary) == (1, step_times.LARGE_VOCABULARY)
    ]
    if walks:
        yield _goal(
            f"verification, batch 1, vocabulary {step_times.LARGE_VOCABULARY}", 1e3 * max(walks),
            _VERIFY_MILLISECONDS, "at most", "ms",
        )  # fmt: skip


def _of_steps(stage: StageReport) -> Iterator[Goal]:
    for plain in _parts(stage, step_times.PLAIN_STEP):
        for tree in _parts(stage, step_times.TREE_STEP):
            if tree.context_length == plain.context_length:
                yield _goal(
                    f"tree step of {tree.tokens} nodes, context {tree.context_length}: of a plain "
                    "step", tree.seconds / plain.seconds, _STEP_RATIO, "at most", "x",
                )  # fmt: skip
    levels = _parts(stage, step_times.DRAFT_LEVEL)
    for vocabulary in sorted({time.vocabulary for time in levels}):
        slowest = max(time.seconds for time in levels if time.vocabulary == vocabulary)
        yield _goal(
            f"slowest draft level, vocabulary {vocabulary}", 1e3 * slowest, _LEVEL_MILLISECONDS,
            "at most", "ms",
        )  # fmt: skip


def _of_engine(stage: StageReport) -> Iterator[Goal]:
    for result in stage.facts.get("bench", {}).get("results", []):
        ratio = result.get("measured_over_predicted")
        if ratio is not None:
            yield _goal(
                f"{result['method']}, batch {result['batch_size']}, temperature "
                f"{result['temperature']:g}: of the predicted speedup",
                100 * ratio, _PREDICTED_PERCENT, "at least", "%",
            )  # fmt: skip


def _parts(stage: StageReport, part: str) -> list[PartTime]:
    return [time for time in stage.parts if time.part == part]
