"""Checks every kernel against torch, and times it. It needs torch and Triton, nothing else."""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.check.report import GpuCheckError, GpuCheckReport

WRONG, CANNOT = 1, 2  # exit codes


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: Command line; None: the process's own.

    Returns:
        Exit code: 0, 1 if something is wrong, 2 if it cannot be checked.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__)
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("kernels.json"),
        help="file for the report (kernels.json)",
    )  # fmt: skip
    parser.add_argument(
        "--tiny", action="store_true",
        help="smallest sizes; with TRITON_INTERPRET=1 on a CPU, where times mean nothing",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, help="run nothing: show this report")
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
        report = run_check(given.output, given.tiny)
        _say(f"written to {given.output}")
    print("\n".join(lines_of(report)))
    return 0 if report.passed else WRONG


def run_check(output: Path, tiny: bool) -> GpuCheckReport:
    """Checks and times all kernels.

    Args:
        output: File for the report.
        tiny: Smallest sizes.

    Raises:
        GpuCheckError: There is no GPU, or what is needed is missing.
    """
    if not output.parent.is_dir():
        raise GpuCheckError(f"--output {output}: there is no folder {output.parent}")
    try:
        import torch  # noqa: F401 (is it there?)
        import triton  # noqa: F401
    except ImportError as error:
        raise GpuCheckError(f"PyTorch and Triton are needed: {error}") from error
    from benchmarks.gpu.check.attention_check import check_attention, time_attention
    from benchmarks.gpu.check.machine import Machine
    from benchmarks.gpu.check.sampling_check import check_sampling
    from benchmarks.gpu.check.stage import StageRun
    from benchmarks.gpu.check.timing import (
        copy_bytes_per_second,
        make_timer,
        product_operations_per_second,
    )
    from benchmarks.gpu.check.verification_times import time_verification

    machine = Machine.find(tiny)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = GpuCheckReport(today, machine.name, machine.interpreted, machine.provenance())
    run = StageRun(machine, make_timer(machine), tiny, _say)
    report.stages["kernels"] = run.found
    started = time.monotonic()
    check_attention(run)
    report.save(output)
    check_sampling(run)
    report.save(output)
    report.copy_bytes_per_second = copy_bytes_per_second(machine, run.timer)
    report.product_operations_per_second = product_operations_per_second(machine, run.timer)
    time_verification(run)
    report.save(output)
    time_attention(run, report.copy_bytes_per_second, report.product_operations_per_second)
    run.found.seconds = time.monotonic() - started
    report.save(output)
    return report


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
