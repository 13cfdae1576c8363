"""``python examples/train_drafter``: train drafters of three kinds, and measure them.

A draft model, an EAGLE-3 head or a DFlash head for any Llama-like target; a small pair.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from console import (
    BatchSize,
    Device,
    Folders,
    MaxFiles,
    Numbers,
    PairPrompts,
    ShapeOption,
    Steps,
    Threads,
    ValidateEvery,
    ValidationFiles,
    Warmup,
    console,
    counting,
    progress,
    set_up_torch,
    write_json,
)
from corpus import collect, default_folders
from draft_commands import draft_data, evaluate_draft, train_draft_model, train_head_of_target
from errors import PairError
from pair import Recipe, train_pair
from provenance import provenance
from quality import Estimate, PairQuality, measure_pair, read_prompts
from rich.table import Table
from token_data import LARGEST_VOCABULARY, SMALLEST_VOCABULARY
from training import Schedule

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)
app.command()(draft_data)
app.command("train-draft")(train_draft_model)
app.command("train-head")(train_head_of_target)
app.command()(evaluate_draft)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="New folder for the pair and its metrics.json.")],
    folder: Folders = None,
    max_files: MaxFiles = 12_000,
    validation_files: ValidationFiles = 60,
    vocab_size: Annotated[
        int,
        typer.Option(help="Tokens to learn.", min=SMALLEST_VOCABULARY, max=LARGEST_VOCABULARY),
    ] = 4096,
    target: ShapeOption = "256x4x4x672",  # type: ignore[assignment]  # typer parses defaults too
    draft: ShapeOption = "192x2x6x512",  # type: ignore[assignment]
    steps: Steps = 0,
    warmup: Warmup = 100,
    batch_size: BatchSize = 16,
    sequence_length: Annotated[int, typer.Option(help="Tokens in a sequence.", min=2)] = 256,
    validate_every: ValidateEvery = 500,
    seed: Annotated[int, typer.Option(help="Decides files, weights and order.")] = 0,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Train a target and a draft with one tokenizer; the defaults are the example pair's recipe."""
    if out.exists():
        raise PairError(f"{out} exists already; choose a new folder")
    set_up_torch(threads)
    schedule = Schedule(steps, warmup, batch_size, validate_every, seed)
    recipe = Recipe(
        {"target": target, "draft": draft}, vocab_size, sequence_length, schedule, device
    )
    with progress() as listener:
        listener.on_stage("files", None)
        corpus = collect(
            folder or default_folders(),
            max_files=max_files,
            validation_files=validation_files,
            seed=seed,
        )
        record = train_pair(corpus, recipe, out, listener)
    quality = _measure(out, read_prompts(out / "prompts.jsonl"), device)
    metrics = {**record, "quality": asdict(quality), "provenance": provenance()}
    write_json(out / "metrics.json", metrics)
    _show(quality)


@app.command()
def evaluate(
    pair: Annotated[
        Path, typer.Argument(help="Folder with target/ and draft/.", exists=True, file_okay=False)
    ],
    prompts: PairPrompts = None,
    out: Numbers = None,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Measure a pair on prompts, teacher forced: the numbers of the model card."""
    set_up_torch(threads)
    quality = _measure(pair, read_prompts(prompts or pair / "prompts.jsonl"), device)
    if out:
        write_json(out, {"quality": asdict(quality), "provenance": provenance()})
    _show(quality)


def _measure(pair: Path, prompts: list[str], device: str) -> PairQuality:
    with counting(len(prompts)) as advance:
        return measure_pair(pair, prompts, device, advance)


def _show(quality: PairQuality) -> None:
    table = Table("", "mean", "± s.e.")
    for name, value in vars(quality).items():
        label = name.replace("_", " ")
        if isinstance(value, Estimate):
            table.add_row(label, f"{value.mean:.4f}", f"{value.standard_error:.4f}")
        else:
            table.add_row(label, f"{value:,}", "")
    console.print(table)


if __name__ == "__main__":
    try:
        app()
    except PairError as error:
        raise SystemExit(f"error: {error}") from error
