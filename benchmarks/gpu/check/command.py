"""Runs the stages, writes the report, prints the tables."""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.check.report import GpuCheckError, GpuCheckReport

if TYPE_CHECKING:
    from benchmarks.gpu.check.stage import StageRun

STAGES = ("kernels", "steps", "engine")
WRONG, CANNOT = 1, 2  # exit codes
_MODELS = Path(__file__).parents[3] / "examples" / "models"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code: 0, 1 if something is wrong, 2 if it cannot be checked.

    Args:
        arguments: Of the command line; None: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m sequoia_vllm.gpu_check", description=__doc__)
    parser.add_argument(
        "--stages", default=",".join(STAGES), help="which, separated by commas (all)"
    )
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("gpu-check.json"),
        help="file for the report; written after each stage (gpu-check.json)",
    )  # fmt: skip
    parser.add_argument(
        "--models", type=Path, default=_MODELS, help="pair that the engine's stage grows"
    )
    parser.add_argument(
        "--tiny", action="store_true",
        help="smallest sizes; with TRITON_INTERPRET=1 on a CPU, where times mean nothing",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, help="run nothing: show this report")
    parser.add_argument(
        "--profile", type=Path,
        help="write the times of steps as a profile for the tree library (needs pydantic)",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        return _run(given)
    except GpuCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT


def _run(given: argparse.Namespace) -> int:
    from benchmarks.gpu.check.table import lines_of

    if given.report is not None:
        report = GpuCheckReport.load(given.report)
    else:
        report = run_check(given.stages.split(","), given.output, given.models, given.tiny)
        _say(f"written to {given.output}")
    print("\n".join(lines_of(report)))
    if given.profile is not None:
        from benchmarks.gpu.check.profile_of_report import profile_of

        profile_of(report).save(given.profile)
        _say(f"profile written to {given.profile}")
    return 0 if report.passed else WRONG


def run_check(stages: Sequence[str], output: Path, models: Path, tiny: bool) -> GpuCheckReport:
    """Runs these stages.

    Args:
        stages: Of `STAGES`.
        output: Written after each of them.
        models: Folder of the pair that the engine's stage grows.
        tiny: Smallest sizes.

    Raises:
        GpuCheckError: If there is no such stage, no GPU, or what is needed is missing.
    """
    unknown = [name for name in stages if name not in STAGES]
    if unknown:
        raise GpuCheckError(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    if not output.parent.is_dir():
        raise GpuCheckError(f"--output {output}: there is no folder {output.parent}")
    try:
        import torch
        import triton  # noqa: F401 (is it there?)
    except ImportError as error:
        raise GpuCheckError(f"PyTorch and Triton are needed: {error}") from error
    from benchmarks.gpu.check.goals import judge
    from benchmarks.gpu.check.machine import Machine
    from benchmarks.gpu.check.stage import StageRun
    from benchmarks.gpu.check.timing import make_timer

    machine = Machine.find(tiny)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = GpuCheckReport(today, machine.name, machine.interpreted, machine.provenance())
    for name in stages:
        reason = _why_not(name, tiny)
        if reason is not None:
            report.skipped[name] = reason
            _say(f"{name}: skipped, {reason}")
            continue
        _say(f"--- {name}")
        run = StageRun(machine, make_timer(machine), tiny, _say)
        report.stages[name] = run.found
        started = time.monotonic()
        _RUNNERS[name](run, report, models)
        run.found.seconds = time.monotonic() - started
        report.goals = judge(report)
        report.save(output)
        del run
        if not machine.interpreted:
            torch.cuda.empty_cache()
    report.save(output)
    return report


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _why_not(stage: str, tiny: bool) -> str | None:
    if stage != "engine":
        return None
    from benchmarks.gpu.check.engine_stage import why_not

    return why_not(tiny)


def _kernels(run: StageRun, report: GpuCheckReport, models: Path) -> None:
    from benchmarks.gpu.check.attention_check import check_attention, time_attention
    from benchmarks.gpu.check.sampling_check import check_sampling
    from benchmarks.gpu.check.timing import copy_bytes_per_second, product_operations_per_second
    from benchmarks.gpu.check.verification_times import time_verification

    check_attention(run)
    check_sampling(run)
    report.copy_bytes_per_second = copy_bytes_per_second(run.machine, run.timer)
    report.product_operations_per_second = product_operations_per_second(run.machine, run.timer)
    time_verification(run)
    time_attention(run, report.copy_bytes_per_second, report.product_operations_per_second)


def _steps(run: StageRun, report: GpuCheckReport, models: Path) -> None:
    from benchmarks.gpu.check.decoding import check_decoding
    from benchmarks.gpu.check.step_times import run_steps

    check_decoding(run)
    run_steps(run)


def _engine(run: StageRun, report: GpuCheckReport, models: Path) -> None:
    from benchmarks.gpu.check.engine_stage import run_engine

    run_engine(run, models)


_RUNNERS: dict[str, Callable[..., None]] = {
    "kernels": _kernels,
    "steps": _steps,
    "engine": _engine,
}
