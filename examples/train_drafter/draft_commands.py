"""The commands for one target: let it write, train a draft model or a head, measure either."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from console import (
    BatchSize,
    Device,
    Numbers,
    ShapeOption,
    Steps,
    Threads,
    ValidateEvery,
    Warmup,
    console,
    counting,
    progress,
    set_up_torch,
    write_json,
)
from distil import DraftRecipe, train_draft
from draft_card import write_card
from draft_data import DraftDataRecipe, read_shards, write_draft_data
from draft_quality import DraftQuality, as_data, measure_draft
from errors import PairError
from heads import KINDS, HeadRecipe, train_head
from provenance import digest, provenance
from rich.table import Table
from training import CHECKPOINT, Listener, Schedule

Data = Annotated[
    Path, typer.Option(help="Folder that draft-data wrote.", exists=True, file_okay=False)
]
Out = Annotated[Path, typer.Option(help="Folder for the drafter; a stopped run goes on there.")]
SequenceLength = Annotated[int, typer.Option(help="Tokens that are read.", min=16)]


def draft_data(
    target: Annotated[
        Path, typer.Option(help="Folder of the target.", exists=True, file_okay=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the answers; a stopped run goes on there.")],
    texts: Annotated[int, typer.Option(help="Answers to learn from.", min=1)] = 6_000,
    answer: Annotated[int, typer.Option(help="Most tokens of an answer.", min=8)] = 192,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Lines of {"prompt": …} or {"messages": …}, also with a "kind". Default: prompts '
            "of five kinds that were written for this script.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides prompts and answers.")] = 0,
    dtype: Annotated[str, typer.Option(help="vLLM's, of the target.")] = "auto",
    threads: Threads = 0,
) -> None:
    """Let the target answer prompts, and keep its distribution of every token."""
    set_up_torch(threads)
    recipe = DraftDataRecipe(
        str(target.absolute()), str(prompts.absolute()) if prompts else None, answer, seed, dtype,
        digest(target, "*.safetensors"), digest(prompts.parent, prompts.name) if prompts else None,
    )  # fmt: skip
    with progress() as listener:
        record = write_draft_data(recipe, texts, out, listener)
    write_json(out / "data.json", {**record, "provenance": provenance()})
    console.print(
        f"{record['answered_tokens']:,} tokens in {record['hours']:.2f} hours: "
        f"{record['tokens_per_second']:.0f} tokens/s"
    )
    learnt = sum(len(shard.ends) for shard in read_shards(out, "training"))
    if learnt < texts:
        console.print(
            f"note: {prompts} has prompts for {learnt} answers to learn from, not {texts}"
        )


def train_draft_model(
    data: Data,
    out: Out,
    shape: ShapeOption = "192x3x6x512",  # type: ignore[assignment]  # typer parses defaults too
    tokens: Annotated[
        int, typer.Option(help="Tokens of the draft: the target's most frequent; 0: all.", min=0)
    ] = 8_192,
    learning_rate: Annotated[float, typer.Option(help="The highest.", min=0)] = 3e-3,
    steps: Steps = 0,
    warmup: Warmup = 50,
    batch_size: BatchSize = 16,
    sequence_length: SequenceLength = 320,
    validate_every: ValidateEvery = 100,
    seed: Annotated[int, typer.Option(help="Decides weights and order.")] = 0,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Train a draft model on the target's answers, and measure it on held-out ones."""
    schedule = Schedule(steps, warmup, batch_size, validate_every, seed)
    recipe = DraftRecipe(shape, tokens, sequence_length, learning_rate, schedule, device)
    _train(partial(train_draft, recipe), data, out, device, threads)


def train_head_of_target(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    data: Data,
    out: Out,
    mlp: Annotated[int, typer.Option(help="Size of a layer's MLP; 0: the target's.", min=0)] = 0,
    tokens: Annotated[
        int,
        typer.Option(
            help="Tokens that EAGLE-3 can draft: the most frequent; 0: all. DFlash has all.", min=0
        ),
    ] = 8_192,
    learning_rate: Annotated[float, typer.Option(help="The highest.", min=0)] = 1e-3,
    muon: Annotated[bool, typer.Option(help="Whether matrices learn by Muon.")] = False,
    steps: Steps = 0,
    warmup: Warmup = 50,
    batch_size: BatchSize = 8,
    sequence_length: SequenceLength = 320,
    validate_every: ValidateEvery = 100,
    seed: Annotated[int, typer.Option(help="Decides weights and order.")] = 0,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Train an EAGLE-3 or a DFlash head on the same answers, and measure it on held-out ones."""
    schedule = Schedule(steps, warmup, batch_size, validate_every, seed)
    recipe = HeadRecipe(kind, mlp, tokens, sequence_length, learning_rate, muon, schedule, device)
    _train(partial(train_head, recipe), data, out, device, threads)


def evaluate_draft(
    draft: Annotated[
        Path,
        typer.Argument(help="Folder of the draft model or head.", exists=True, file_okay=False),
    ],
    data: Data,
    out: Numbers = None,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Measure how often the target accepts tokens of a draft model or a head, by kind of prompt."""
    set_up_torch(threads)
    quality = _measure(draft, data, device)
    if out:
        write_json(out, {"quality": as_data(quality), "provenance": provenance()})
    _show(quality)


def _train(
    train: Callable[[Path, Path, Listener], dict[str, Any]],
    data: Path,
    out: Path,
    device: str,
    threads: int,
) -> None:
    """Trains a drafter, measures it, and writes its record and its card."""
    if (out / "config.json").is_file() and not (out / CHECKPOINT).is_file():
        raise PairError(f"{out} has a trained drafter; choose a new folder")
    set_up_torch(threads)
    with progress() as listener:
        record = train(data, out, listener)
    quality = _measure(out, data, device)
    hashes = {
        "the weights": digest(out, "*.safetensors"),
        "the target's weights": digest(Path(record["target"]), "*.safetensors"),
        "the answers": digest(data, "*.npz"),
    }
    found = {"sha256": hashes, "quality": as_data(quality), "provenance": provenance()}
    write_json(out / "metrics.json", metrics := {**record, **found})
    write_card(out, data, metrics, quality)
    (out / CHECKPOINT).unlink(missing_ok=True)
    _show(quality)


def _measure(draft: Path, data: Path, device: str) -> dict[str, DraftQuality]:
    count = sum(len(shard.ends) for shard in read_shards(data, "validation"))
    with counting(count) as advance:
        return measure_draft(draft, data, device, advance)


def _show(quality: dict[str, DraftQuality]) -> None:
    table = Table("kind", "greedy", "tokens per step", "T = 1", "greedy tokens")
    for kind, one in quality.items():
        shares = (f"{one.greedy:.3f}", f"{one.tokens_per_step:.2f}", f"{one.sampled:.3f}")
        table.add_row(kind, *shares, f"{one.greedy_tokens:,}")
    console.print(table)
