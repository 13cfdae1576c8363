"""``sequoia-vllm calibrate``: measures acceptance and times on live engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sequoia_vllm.cli.common import console, fail, friendly_errors, note, print_json, progress_bar

if TYPE_CHECKING:
    from sequoia_vllm.hardware.profile import Curve, Profile
    from sequoia_vllm.tree.library_files import AcceptanceFile

PROMPTS = Path(__file__).parents[2] / "examples" / "models" / "prompts.jsonl"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure, on live engines, what trees are optimised for: how often drafts are accepted, "
    "and how long each part of a step takes.",
)

TargetOption = Annotated[str, typer.Option(help="Target model, name or path.")]
DraftOption = Annotated[str, typer.Option(help="Draft model, name or path.")]
PromptsOption = Annotated[
    Path, typer.Option(help='Prompts: a .jsonl file with a "prompt" per line.')
]
DtypeOption = Annotated[str, typer.Option(help="vLLM's dtype.")]
EagerOption = Annotated[bool, typer.Option("--eager", help="Do not compile: starts faster.")]
CacheOption = Annotated[float, typer.Option("--kv-cache-gib", help="KV cache of each engine, GiB.")]
OutputOption = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def acceptance(
    target: TargetOption,
    draft: DraftOption,
    prompts: PromptsOption = PROMPTS,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to use.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per completion.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Nucleus of the target.")] = 1.0,
    branch: Annotated[int, typer.Option(min=1, max=64, help="Children to offer.")] = 32,
    depth: Annotated[
        int, typer.Option(min=1, max=16, help="Rows: measure below accepted first children, too.")
    ] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    dtype: DtypeOption = "auto",
    eager: EagerOption = False,
    kv_cache_gib: CacheOption = 1.0,
    name: Annotated[
        str | None, typer.Option(help="Draft strength class; none: the output file's name.")
    ] = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how often the target accepts the draft's k-th child."""
    from sequoia_vllm.calibration.acceptance import (
        AcceptanceSettings,
        class_name,
        measure_acceptance,
    )

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings = AcceptanceSettings(
        target, draft, prompts, num_prompts, max_tokens, temperature, top_p, branch, depth,
        batch_size, dtype, eager, kv_cache_gib,
    )  # fmt: skip
    with friendly_errors(), _calibration_errors(), progress_bar("acceptance:") as report:
        _check_output(output)
        chosen = name or class_name(output.stem if output else f"t{temperature:g}")
        measured = measure_acceptance(settings, chosen, report)
    _finish(measured, output, as_json)
    if not as_json:
        _print_acceptance(measured)


@app.command()
def profile(
    target: TargetOption,
    draft: DraftOption,
    prompts: PromptsOption = PROMPTS,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once.")] = "1,2,4,8",
    tokens: Annotated[
        str, typer.Option(help="Tree sizes, root included; 1 is plain decoding.")
    ] = "1,2,4,8,16,32,64",
    context: Annotated[int, typer.Option(min=1, help="Tokens of context.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per completion.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the quietest counts.")] = 5,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    dtype: DtypeOption = "auto",
    eager: EagerOption = False,
    kv_cache_gib: CacheOption = 1.0,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the times of the target, of the draft's levels, and of the rest of a step."""
    from sequoia_vllm.calibration.profile import ProfileSettings, measure_profile

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with friendly_errors(), _calibration_errors(), progress_bar("profile:") as report:
        _check_output(output)
        settings = ProfileSettings(
            target, draft, prompts, _numbers("--batch-sizes", batch_sizes),
            _numbers("--tokens", tokens), context, max_tokens, rounds, temperature, dtype, eager,
            kv_cache_gib,
        )  # fmt: skip
        measured = measure_profile(settings, report)
    _finish(measured, output, as_json)
    if not as_json:
        _print_profile(measured)


@contextmanager
def _calibration_errors() -> Iterator[None]:
    from sequoia_vllm.calibration.errors import CalibrationError

    try:
        yield
    except CalibrationError as error:
        fail(str(error))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """A list like ``1,2,4``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        fail(f"{option} {text!r}: give whole numbers separated by commas, like 1,2,4")


def _check_output(output: Path | None) -> None:
    """Fails before anything is measured that could not be written."""
    if output is not None and not output.absolute().parent.is_dir():
        fail(f"--output {output}: there is no directory {output.parent}")


def _finish(measured: AcceptanceFile | Profile, output: Path | None, as_json: bool) -> None:
    from sequoia_vllm.tree.json_file import dump_json

    if output is not None:
        output.write_text(dump_json(measured.to_dict()), encoding="utf-8")
        note(f"written to {output}")
    elif not as_json:
        note("not written: give --output FILE to keep the result")
    if as_json:
        print_json(measured.to_dict())


def _print_acceptance(measured: AcceptanceFile) -> None:
    import numpy as np
    from rich.table import Table

    rows = measured.vector.table
    trials, low, high = (
        np.atleast_2d(np.asarray(values))
        for values in (measured.trials, measured.low, measured.high)
    )
    table = Table(title=measured.description, box=None, pad_edge=False, header_style="bold")
    for column in ("depth", "child", "accepted", "95 % interval", "trials"):
        table.add_column(column, justify="right")
    for depth, row in enumerate(rows):
        for child, share in enumerate(row):
            table.add_row(
                str(depth + 1), str(child + 1), f"{share:.4f}",
                f"{low[depth][child]:.4f} to {high[depth][child]:.4f}", str(trials[depth][child]),
            )  # fmt: skip
    console().print(table)
    console().print(f"Any child: {', '.join(f'{row.sum():.4f}' for row in rows)}")


def _print_profile(measured: Profile) -> None:
    from rich.table import Table

    sizes = sorted({n for curve in measured.target_forward for n in curve.tokens})
    drafts = {curve.batch_size: curve for curve in measured.draft_level}
    rest = {entry.batch_size: entry for entry in measured.overhead}
    table = Table(
        title=f"{measured.device}, {measured.dtype}: milliseconds by tokens per request",
        box=None, pad_edge=False, header_style="bold",
    )  # fmt: skip
    for column in ("batch", "part", *map(str, sizes), "outside: plain", "tree"):
        table.add_column(column, justify="right")
    for curve in measured.target_forward:
        overhead, draft = rest[curve.batch_size], drafts[curve.batch_size]
        outside = (overhead.plain_seconds, overhead.tree_seconds)
        table.add_row(
            str(curve.batch_size), "target", *_cells(curve, sizes),
            *(f"{1e3 * seconds:.2f}" for seconds in outside),
        )  # fmt: skip
        table.add_row("", "draft level", *_cells(draft, sizes), "", "")
    console().print(table)


def _cells(curve: Curve, sizes: list[int]) -> list[str]:
    seconds = dict(zip(curve.tokens, curve.seconds, strict=True))
    return [f"{1e3 * seconds[n]:.2f}" if n in seconds else "" for n in sizes]
