"""``sequoia-vllm calibrate``: measures how often drafts are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    RawPromptsOption,
    RestartOption,
    TargetOption,
    TemperatureOption,
    TensorParallelOption,
    TopPOption,
    check_models,
    check_output,
    measuring,
    note_synthetic,
    offload_spec,
    quiet_engines,
    write_file,
)

if TYPE_CHECKING:
    from sequoia_vllm.calibration.acceptance import AcceptanceTask
    from sequoia_vllm.library.files import AcceptanceFile, CalibrationState


def calibrate(
    target: TargetOption,
    draft: DraftOption,
    prompts: PromptsOption = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Use the first so many prompts; none: all.")
    ] = None,
    raw_prompts: RawPromptsOption = False,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    precision: Annotated[
        float,
        typer.Option(
            min=1e-4,
            max=0.5,
            help="Go on over the prompts until no entry's 95 % half-width, times the share of "
            "trees that reach its depth, is above this.",
        ),
    ] = 0.02,
    max_tokens_total: Annotated[
        int, typer.Option(min=1, help="Stop when so many tokens were generated.")
    ] = 100_000,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per completion.")] = 128,
    branch: Annotated[
        int, typer.Option(min=1, max=64, help="Children to offer at each node: entries of a row.")
    ] = 10,
    depth: Annotated[
        int, typer.Option(min=1, max=16, help="Rows of the vector: depths to measure.")
    ] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    dtype: DtypeOption = "auto",
    tensor_parallel_size: TensorParallelOption = 1,
    eager: EagerOption = False,
    kv_cache_gib: CacheOption = 1.0,
    offload_directory: OffloadDirectoryOption = None,
    offload_memory_gib: OffloadMemoryOption = 0.0,
    name: Annotated[
        str | None, typer.Option(help="Draft strength class; none: the output file's name.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, and to go on from.")
    ] = Path("acceptance.json"),
    restart: RestartOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how often the target accepts the draft's k-th child, at each depth.

    A live engine drafts a wide tree and the verifier's decisions are counted.
    Ctrl-C keeps what there is: the same command goes on from it.
    """
    from sequoia_vllm.calibration.acceptance import AcceptanceSettings, AcceptanceTask, class_name
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
    settings = AcceptanceSettings(
        engine, prompts=prompts, num_prompts=num_prompts, raw_prompts=raw_prompts,
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, branch=branch, depth=depth,
        precision=precision, max_tokens_total=max_tokens_total, batch_size=batch_size,
    )  # fmt: skip
    with friendly_errors():
        check_output("--output", output)
        task = AcceptanceTask.prepare(settings, name or class_name(output.stem))
        measured = measure_into(output, task, restart)
    if as_json:
        print_json(measured.to_dict())
    else:
        print_acceptance(measured)
    finish(measured, output)


def measure_into(
    path: Path, task: AcceptanceTask, restart: bool, *, stage: str = ""
) -> AcceptanceFile:
    """Measures, goes on from what ``path`` holds of the same measurement, and writes it there.

    An interrupted measurement comes back marked incomplete, and is on disk. Progress
    is said to be of this ``stage`` of a command.
    """
    from sequoia_vllm.calibration.acceptance import measure_acceptance

    previous = None if restart else _previous(path, task)
    if previous is not None and task.is_done(state := _state(previous)):
        note(f"{path} holds this measurement already ({covered(state)}); --restart measures anew")
        return previous
    start = None
    if previous is not None and task.can_go_on(state := _state(previous)):
        note(f"going on from {path}: {covered(state)}")
        start = state
    with measuring(f"{stage}acceptance:", "interrupted before anything was measured") as report:
        measured = measure_acceptance(task, start, report, save=lambda file: write_file(path, file))
    write_file(path, measured)
    return measured


def covered(state: CalibrationState) -> str:
    """How much was measured, in words."""
    known = "" if state.precision is None else f", known within {state.precision:.4f}"
    return f"{state.trees} trees, {state.tokens} tokens{known}"


def finish(measured: AcceptanceFile, path: Path) -> None:
    """Says where the result is and how far it got; ends the program if it was interrupted."""
    from sequoia_vllm.measuring.engine_processes import exit_code, last_interrupt

    state = _state(measured)
    if not state.complete:
        note(f"interrupted: {path} keeps {covered(state)}; the same command goes on from there")
        raise typer.Exit(exit_code(last_interrupt()))
    reason = {
        "precision": "the precision asked for was reached",
        "tokens": f"--max-tokens-total was reached before ±{state.wanted_precision:g} was",
        "prompts": "all greedy completions are at their end: more prompts, or a larger "
        "--max-tokens, would say more",
    }[str(state.stopped_by)]
    note(f"written to {path}: {covered(state)}; {reason}")


def print_acceptance(measured: AcceptanceFile) -> None:
    """The vector as a table: rows are children, columns are depths."""
    import numpy as np
    from rich.table import Table

    rows = measured.vector.table
    low, high = (np.atleast_2d(np.asarray(ends)) for ends in (measured.low, measured.high))
    trials = np.atleast_2d(np.asarray(measured.trials))
    table = Table(
        title=measured.description, box=None, pad_edge=False, header_style="bold",
        caption="share accepted, half-width of its 95 % interval",
    )  # fmt: skip
    table.add_column("child", justify="right")
    for depth in range(len(rows)):
        table.add_column(f"depth {depth + 1}", justify="right", no_wrap=True)
    for child in range(rows.shape[1]):
        cells = [
            f"{rows[depth, child]:.3f} ±{(high[depth, child] - low[depth, child]) / 2:.3f}"
            for depth in range(len(rows))
        ]
        table.add_row(str(child + 1), *cells)
    table.add_row("any", *(f"{row.sum():.3f}" for row in rows))
    table.add_row("trials", *(str(row[0]) for row in trials))
    console().print(table)


def _previous(path: Path, task: AcceptanceTask) -> AcceptanceFile | None:
    """What an earlier run of the same measurement wrote."""
    from sequoia_vllm.library.files import AcceptanceFile

    if not path.is_file():
        return None
    file = AcceptanceFile.load(path)
    if file.calibration is None:
        note(f"{path} was not written by this command: starting anew")
        return None
    if changed := task.differences(file.calibration):
        note(f"{path} holds another measurement ({', '.join(changed)} differ): starting anew")
        return None
    return file


def _state(file: AcceptanceFile) -> CalibrationState:
    assert file.calibration is not None  # every file that this command writes has one
    return file.calibration
