"""``sequoia-vllm profile``: measures how long each part of a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sequoia_vllm.cli.common import console, friendly_errors, note, print_json
from sequoia_vllm.cli.measuring import (
    CacheOption,
    DraftOption,
    DtypeOption,
    EagerOption,
    JsonOption,
    OffloadDirectoryOption,
    OffloadMemoryOption,
    PromptsOption,
    TargetOption,
    TemperatureOption,
    TensorParallelOption,
    check_models,
    check_output,
    measuring,
    note_synthetic,
    numbers,
    offload_spec,
    quiet_engines,
    write_file,
)

if TYPE_CHECKING:
    from sequoia_vllm.calibration.profiling import ProfileSettings
    from sequoia_vllm.hardware.step_profile import Curve, Overhead, Profile
    from sequoia_vllm.tree.acceptance import Acceptance


def profile(
    target: TargetOption,
    draft: DraftOption,
    prompts: PromptsOption = None,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once.")] = "1,2,4,8",
    tokens: Annotated[
        str,
        typer.Option(
            help="Tree sizes, root included; 1 is plain decoding. Sizes beyond one whose step "
            "takes as long as 12 plain steps are not measured."
        ),
    ] = "1,2,4,8,16,32,64",
    contexts: Annotated[str, typer.Option(help="Tokens of context of each request.")] = "256,1024",
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per completion.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the middle one counts.")] = 3,
    temperature: TemperatureOption = 0.0,
    dtype: DtypeOption = "auto",
    tensor_parallel_size: TensorParallelOption = 1,
    eager: EagerOption = False,
    kv_cache_gib: CacheOption = 1.0,
    offload_directory: OffloadDirectoryOption = None,
    offload_memory_gib: OffloadMemoryOption = 0.0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write the profile to.")
    ] = Path("profile.json"),
    plot: Annotated[
        Path | None, typer.Option(help="Draw t(n)/t(1) to this file (.svg, .png or .pdf).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the times of the target, of a draft level, of verification and of the rest.

    A plain and a Sequoia engine run in turns, warm, with the attention and the
    compilation that they serve with; every figure is a median over steps.
    """
    from sequoia_vllm.calibration.profile_figure import plot_profile
    from sequoia_vllm.calibration.profiling import ProfileSettings
    from sequoia_vllm.figures import check_format, require_matplotlib
    from sequoia_vllm.measuring.engines import EngineSpec

    quiet_engines()
    with friendly_errors():
        check_models(target, draft)
    note_synthetic(target, draft)
    engine = EngineSpec(
        target, draft, dtype=dtype, tensor_parallel_size=tensor_parallel_size,
        enforce_eager=eager, kv_cache_gib=kv_cache_gib,
        offload=offload_spec(offload_directory, offload_memory_gib),
    )  # fmt: skip
    with friendly_errors():
        check_output("--output", output)
        if plot is not None:
            check_output("--plot", plot)
            check_format(plot)
            require_matplotlib()
        settings = ProfileSettings(
            engine, prompts=prompts, batch_sizes=numbers("--batch-sizes", batch_sizes),
            tokens=numbers("--tokens", tokens), contexts=numbers("--contexts", contexts),
            max_tokens=max_tokens, rounds=rounds, temperature=temperature,
        )  # fmt: skip
        measured = measure_into(output, settings)
        if plot is not None:
            plot_profile(measured, plot)
    if as_json:
        print_json(measured.to_dict())
    else:
        print_profile(measured)
    note(f"written to {output}" + (f", drawn to {plot}" if plot else ""))


def measure_into(
    path: Path, settings: ProfileSettings, *, vectors: Sequence[Acceptance] = (), stage: str = ""
) -> Profile:
    """Measures (`measure_profile`), and writes the profile.

    Progress is said to be of this ``stage`` of a command.
    """
    from sequoia_vllm.calibration.profiling import measure_profile

    with measuring(f"{stage}profile:", "interrupted: no profile was written") as report:
        measured = measure_profile(settings, report, vectors)
    write_file(path, measured)
    return measured


def print_profile(measured: Profile) -> None:
    """One table for each context: milliseconds by batch size, part and tokens."""
    for context in sorted({curve.context_length for curve in measured.target_forward}):
        _print_context(measured, context)


def _print_context(measured: Profile, context: int) -> None:
    from rich.table import Table

    sizes = sorted({n for curve in measured.target_forward for n in curve.tokens})
    table = Table(
        title=f"{measured.device}, {measured.dtype}, {context} tokens of context",
        caption="milliseconds, by tokens of each request",
        box=None, pad_edge=False, header_style="bold",
    )  # fmt: skip
    for column in ("batch", "part", *map(str, sizes)):
        table.add_column(column, justify="left" if column == "part" else "right")
    parts = {
        "target": measured.target_forward,
        "draft level": measured.draft_level,
        "verification": measured.verification or [],
    }
    for rest in _of_context(measured.overhead, context):
        for name, curves in parts.items():
            for curve in _of_context(curves, context):
                if curve.batch_size == rest.batch_size:
                    batch = str(rest.batch_size) if name == "target" else ""
                    table.add_row(batch, name, *_cells(curve, sizes))
        table.add_row("", "the rest", *_rest(rest, sizes))
    console().print(table)


def _of_context(entries: Sequence[Any], context: int) -> list[Any]:
    """The curves or overheads of this context."""
    return [entry for entry in entries if entry.context_length in (None, context)]


def _cells(curve: Curve, sizes: list[int]) -> list[str]:
    seconds = dict(zip(curve.tokens, curve.seconds, strict=True))
    return [f"{1e3 * seconds[n]:.2f}" if n in seconds else "" for n in sizes]


def _rest(rest: Overhead, sizes: list[int]) -> list[str]:
    tree = f"{1e3 * rest.tree_seconds:.2f}"
    return [f"{1e3 * rest.plain_seconds:.2f}" if n == 1 else tree for n in sizes]
