"""The commands for heads: write data, train one, or measure those of a pair."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import heads
import typer
from console import (
    BatchSize,
    Device,
    Folders,
    MaxFiles,
    Numbers,
    PairPrompts,
    SequenceLength,
    Steps,
    Threads,
    ValidateEvery,
    ValidationFiles,
    Warmup,
    console,
    counting,
    progress,
    progress_listener,
    set_up_torch,
    write_json,
)
from corpus import collect, default_folders
from head_data import DataRecipe, write_head_data
from head_quality import ChainQuality, measure_chains
from provenance import provenance
from quality import read_prompts
from rich.table import Table
from training import Schedule

Pair = Annotated[
    Path,
    typer.Option(help="Folder with target/ and prompts.jsonl.", exists=True, file_okay=False),
]


def head_data(
    pair: Pair,
    out: Annotated[Path, typer.Option(help="Folder for the data, and its data.json.")],
    folder: Folders = None,
    max_files: MaxFiles = 1_000,
    validation_files: ValidationFiles = 60,
    sequences: Annotated[
        int, typer.Option(help="Training sequences by people, and as many by the target.", min=1)
    ] = 6_000,
    sequence_length: SequenceLength = 256,
    seed: Annotated[int, typer.Option(help="Decides the files and what the target writes.")] = 0,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Write what heads learn from: text by people, and text by the target itself."""
    set_up_torch(threads)
    recipe = DataRecipe(sequences, sequence_length, seed, device)
    with progress() as bars:
        listener = progress_listener(bars)
        listener.on_stage("files", None)
        corpus = collect(
            folder or default_folders(),
            max_files=max_files,
            validation_files=validation_files,
            seed=seed,
        )
        sizes = write_head_data(corpus, recipe, pair, out, listener)
    record = {"recipe": asdict(recipe), "tokens": sizes, "provenance": provenance()}
    write_json(out / "data.json", record)


def train_head(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(heads.KINDS)}.")],
    pair: Pair,
    data: Annotated[
        Path, typer.Option(help="Folder that head-data wrote.", exists=True, file_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the head, and its metrics.json.")],
    start_from: Annotated[
        Path | None, typer.Option(help="Head to go on with.", exists=True, file_okay=False)
    ] = None,
    mlp: Annotated[
        int, typer.Option(help="Size of a layer's MLP; 0 is the example head's.", min=0)
    ] = 0,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Tokens that EAGLE-3 can draft: the most frequent.", min=1)
    ] = 2_048,
    learning_rate: Annotated[float, typer.Option(help="The highest.", min=0)] = 1.5e-3,
    muon: Annotated[bool, typer.Option(help="Whether matrices learn by Muon.")] = False,
    steps: Steps = 0,
    warmup: Warmup = 50,
    batch_size: BatchSize = 16,
    sequence_length: SequenceLength = 256,
    validate_every: ValidateEvery = 100,
    seed: Annotated[int, typer.Option(help="Decides weights and order.")] = 0,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Train an EAGLE-3 or a DFlash head for a pair's target; saved at every validation."""
    set_up_torch(threads)
    schedule = Schedule(steps, warmup, batch_size, validate_every, seed)
    recipe = heads.HeadRecipe(
        kind,
        mlp or heads.EXAMPLE_MLP.get(kind, 0),
        draft_vocab_size,
        sequence_length,
        learning_rate,
        muon,
        schedule,
        device,
    )
    with progress() as bars:
        record = heads.train_head(recipe, pair, data, out, progress_listener(bars), start_from)
    write_json(out / "metrics.json", {**record, "provenance": provenance()})


def evaluate_heads(
    pair: Annotated[
        Path,
        typer.Argument(
            help="Folder with target/, draft/ and eagle3/ or dflash/.",
            exists=True,
            file_okay=False,
        ),
    ],
    prompts: PairPrompts = None,
    out: Numbers = None,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Measure greedy chains on prompts: the tokens per step of the draft and of each head."""
    set_up_torch(threads)
    texts = read_prompts(prompts or pair / "prompts.jsonl")
    with counting(len(texts)) as advance:
        quality = measure_chains(pair, texts, device, advance)
    if out:
        write_json(out, {"quality": _plain(quality), "provenance": provenance()})
    _show(quality)


def _plain(quality: dict[str, dict[str, ChainQuality]]) -> dict[str, object]:
    return {
        name: {count: asdict(chain) for count, chain in chains.items()}
        for name, chains in quality.items()
    }


def _show(quality: dict[str, dict[str, ChainQuality]]) -> None:
    table = Table("", "drafts", "tokens per step", "± s.e.", "accepted drafts, by depth")
    for name, chains in quality.items():
        for count, chain in chains.items():
            mean = chain.tokens_per_step
            shares = " ".join(f"{share:.2f}" for share in chain.acceptance)
            table.add_row(name, count, f"{mean.mean:.3f}", f"{mean.standard_error:.3f}", shares)
    console.print(table)
