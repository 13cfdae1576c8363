"""Shows the measurements and choices of ``tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sequoia_vllm.cli.common import console, new_table, note

if TYPE_CHECKING:
    from sequoia_vllm.hardware.step_profile import Profile
    from sequoia_vllm.library.files import AcceptanceFile


def print_acceptance(measured: AcceptanceFile) -> None:
    """Prints the vector as a table: rows are children, columns are depths."""
    import numpy as np

    rows = measured.vector.table
    low, high = (np.atleast_2d(np.asarray(ends)) for ends in (measured.low, measured.high))
    half_widths, trials = (high - low) / 2, np.atleast_2d(np.asarray(measured.trials))
    table = new_table(
        "child", *(f"depth {depth + 1}" for depth in range(len(rows))), title=measured.description,
        caption="share accepted, half-width of its 95 % interval",
    )  # fmt: skip
    for column in table.columns:
        column.no_wrap = True
    for child, (shares, widths) in enumerate(zip(rows.T, half_widths.T, strict=True), start=1):
        cells = (f"{share:.3f} ±{width:.3f}" for share, width in zip(shares, widths, strict=True))
        table.add_row(str(child), *cells)
    table.add_row("any", *(f"{row.sum():.3f}" for row in rows))
    table.add_row("trials", *(str(row[0]) for row in trials))
    console().print(table)


def print_profile(measured: Profile) -> None:
    """Prints a table for each context: milliseconds by batch size, part and tokens."""
    sizes = sorted({n for curve in measured.target_forward for n in curve.tokens})
    parts = {
        "target": measured.target_forward,
        "draft level": measured.draft_level,
        "verification": measured.verification or [],
    }
    for context in sorted({curve.context_length for curve in measured.target_forward}):
        table = new_table(
            "batch", "part", *map(str, sizes), left=["part"],
            title=f"{measured.device}, {measured.dtype}, {context} tokens of context",
            caption="milliseconds, by tokens of each request",
        )  # fmt: skip
        for rest in (one for one in measured.overhead if one.context_length in (None, context)):
            for name, curves in parts.items():
                for curve in curves:
                    if (curve.batch_size, curve.context_length) == (rest.batch_size, context):
                        seconds = dict(zip(curve.tokens, curve.seconds, strict=True))
                        batch = str(rest.batch_size) if name == "target" else ""
                        cells = (f"{1e3 * seconds[n]:.2f}" if n in seconds else "" for n in sizes)
                        table.add_row(batch, name, *cells)
            plain, tree = f"{1e3 * rest.plain_seconds:.2f}", f"{1e3 * rest.tree_seconds:.2f}"
            table.add_row("", "the rest", *(plain if n == 1 else tree for n in sizes))
        console().print(table)


def print_report(report: dict[str, Any]) -> None:
    """Prints the report of `tune_steps.tune_pair`."""
    plain: Any = {"soft_wrap": True, "markup": False, "highlight": False}
    console().print(
        f"{Path(report['target']).name} with {Path(report['draft']).name}, {report['dtype']}, "
        f"{report['context_length']} tokens of context; expected from what was measured:",
        **plain,
    )
    table = new_table("batch", "drafts per request", "tokens per step", "speedup")
    margins = report["tokens_margins"]
    for estimate, margin in zip(report["estimates"], margins, strict=True):
        drafts = estimate["num_speculative_tokens"]
        table.add_row(
            str(estimate["batch_size"]), str(drafts) if drafts else "none: plain decoding",
            f"{estimate['expected_tokens']:.2f}" + (f" ±{margin:.2f}" if margin else ""),
            f"{estimate['speedup']:.2f}x",
        )  # fmt: skip
    console().print(table)
    if any(margins):
        note("±: what counting leaves open (95 %); other prompts than these may differ by more")
    if not report["speculates"]:
        note(
            "speculation does not pay here: the best tree at batch size 1 would run at "
            f"{report['best_tree_at_batch_1']['speedup']:.2f}x plain decoding. Serve without "
            '--speculative-config; with the command below "auto" turns speculation off by itself'
        )
    console().print(f"In use from now on: {report['now_used']}", **plain)
    console().print(report["command"], **plain)
    note(f"the tree is in {report['file']}, what was measured in {report['measurements']}")
