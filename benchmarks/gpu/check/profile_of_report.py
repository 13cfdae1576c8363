"""A profile for the tree library, from the times of steps that a GPU check took.

Both models' passes, drawing, verification and commit are measured. The engine's own
work was not there to be measured: the roofline's assumption stands in for it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from benchmarks.gpu.check import step_times
from benchmarks.gpu.check.report import GpuCheckError, GpuCheckReport, PartTime
from sequoia_vllm.hardware.roofline import Assumptions
from sequoia_vllm.hardware.step_profile import Curve, Overhead, Profile

_WITHOUT_ENGINE = (
    "no engine: passes of models of this shape with random weights, as CUDA graphs of PyTorch and "
    "this project's kernels; overhead is assumed but for commit_seconds"
)


def profile_of(report: GpuCheckReport) -> Profile:
    """The profile of the report's target and draft.

    Raises:
        GpuCheckError: If the report has no times of steps, or meaningless ones.
    """
    if report.interpreted:
        raise GpuCheckError("an interpreted check has no times to make a profile of")
    parts = report.stages["steps"].parts if "steps" in report.stages else []
    targets = _curves(parts, step_times.TARGET_CURVE)
    # Without plain decoding's time nothing can be said of a batch size.
    targets = [curve for curve in targets if curve.tokens[0] == 1]
    drafts = _curves(parts, step_times.LEVEL_CURVE)
    if not targets or not drafts:
        raise GpuCheckError("the report has no times of a target and a draft: run stage steps")
    assumed = Assumptions()
    return Profile(
        source="measured",
        date=datetime.date.fromisoformat(report.date),
        device=report.device,
        target=step_times.TARGET.name,
        draft=step_times.DRAFT.name,
        target_parameters=step_times.TARGET.parameters,
        draft_parameters=step_times.DRAFT.parameters,
        target_forward=targets,
        draft_level=drafts,
        verification=_curves(parts, step_times.VERIFICATION_CURVE) or None,
        overhead=[_overhead(parts, curve.batch_size, assumed) for curve in targets],
        assumptions={
            "plain_step_seconds": assumed.plain_step_seconds,
            "tree_step_seconds": assumed.tree_step_seconds,
        },
        provenance={**report.provenance, "measured_with": _WITHOUT_ENGINE},
    )


def _curves(parts: Iterable[PartTime], name: str) -> list[Curve]:
    by_batch: dict[tuple[int, int], list[PartTime]] = {}
    for part in parts:
        if part.part == name:
            by_batch.setdefault((part.batch_size, part.context_length), []).append(part)
    curves = []
    for (batch, context), times in sorted(by_batch.items()):
        times.sort(key=lambda time: time.tokens)
        curves.append(
            Curve(
                batch_size=batch,
                context_length=context,
                tokens=[time.tokens for time in times],
                seconds=[time.seconds for time in times],
                spread=[time.spread for time in times],
            )
        )
    return curves


def _overhead(parts: Iterable[PartTime], batch_size: int, assumed: Assumptions) -> Overhead:
    commits = [
        part.seconds
        for part in parts
        if part.part == step_times.COMMIT and part.batch_size == batch_size
    ]
    commit = max(commits, default=0.0)
    return Overhead(
        batch_size=batch_size,
        plain_seconds=assumed.plain_step_seconds,
        tree_seconds=assumed.tree_step_seconds + commit,
        commit_seconds=commit,
    )
