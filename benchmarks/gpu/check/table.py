"""A report as short plain tables."""

from benchmarks.gpu.check.report import GpuCheckReport, StageReport
from benchmarks.gpu.table import aligned


def lines_of(report: GpuCheckReport) -> list[str]:
    """The tables; wrong results and failures first."""
    lines = [f"{report.device}" + (" (interpreted: times mean nothing)" * report.interpreted)]
    if report.copy_bytes_per_second:
        lines.append(
            f"a large copy moves {report.copy_bytes_per_second / 1e9:,.0f} GB/s, a large bfloat16 "
            f"product runs at {report.product_operations_per_second / 1e12:,.0f} TFLOP/s"
        )
    for name, stage in report.stages.items():
        lines += ["", *_stage(name, stage)]
    return lines


def _stage(name: str, stage: StageReport) -> list[str]:
    right = sum(check.passed for check in stage.checks)
    lines = [
        f"{name}: {right} of {len(stage.checks)} checks right, {len(stage.failures)} failures, "
        f"{stage.seconds:.0f} s"
    ]
    lines += [
        f"  WRONG {check.name}: {check.error:.3g}, at most {check.limit:.3g}"
        for check in stage.checks
        if not check.passed
    ]
    lines += [f"  FAILED {failure}" for failure in stage.failures]
    if stage.attention:
        rows = [
            (
                time.shape, time.cache_dtype, str(time.batch_size), str(time.context_length),
                str(time.nodes), f"{1e6 * time.seconds:.1f}",
                f"{100 * time.share_of_bandwidth:.0f}",
                f"{100 * time.copy_seconds / time.seconds:.0f}",
                f"{100 * max(time.bandwidth_floor, time.arithmetic_floor) / time.seconds:.0f}",
                "" if time.flash_seconds is None else f"{1e6 * time.flash_seconds:.1f}",
            )
            for time in stage.attention
        ]  # fmt: skip
        heading = (
            "tree attention", "cache", "batch", "context", "nodes", "us", "% of bandwidth",
            "% of a copy of as much", "% of the roofline", "us with FlashAttention",
        )  # fmt: skip
        lines += ["", *aligned([heading, *rows])]
    if stage.parts:
        rows_of_parts = [
            (
                time.part, time.model, str(time.batch_size), str(time.context_length or ""),
                str(time.tokens), str(time.vocabulary or ""), f"{1e3 * time.seconds:.4f}",
            )
            for time in stage.parts
        ]  # fmt: skip
        parts = ("part", "model", "batch", "context", "tokens", "vocabulary", "ms")
        lines += ["", *aligned([parts, *rows_of_parts])]
    return lines
