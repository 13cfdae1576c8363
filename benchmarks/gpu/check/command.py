"""Checks every kernel against torch, and times it. It needs torch and Triton, nothing else."""

import datetime
import sys
import time
from pathlib import Path

from benchmarks.gpu.check.report import GpuCheckError, GpuCheckReport


def run_check(output: Path, tiny: bool) -> GpuCheckReport:
    """Checks and times all kernels."""
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
