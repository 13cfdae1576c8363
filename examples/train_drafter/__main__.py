"""``python examples/train_drafter``: train a draft model or an EAGLE-3 head for your target."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from draft_data import DraftDataRecipe, digest, read_shards, write_draft_data
from draft_model import train_draft
from heads import train_head
from training import Recipe
from transformers.utils import logging as transformers_logging

from sequoia_vllm.cli.common import Report, ends_by_signal, progress_bar
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.measuring.provenance import provenance

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_show_locals=False)
Data = Annotated[
    Path, typer.Option(help="Folder that draft-data wrote.", exists=True, file_okay=False)
]
Out = Annotated[Path, typer.Option(help="Folder for the drafter.")]
Threads = Annotated[int, typer.Option(help="CPU threads of torch; 0 leaves its default.", min=0)]
Tokens = Annotated[
    int, typer.Option(help="Tokens that it drafts: the target's most frequent; 0: all.", min=0)
]
LearningRate = Annotated[float, typer.Option(help="The highest.", min=0)]
Steps = Annotated[int, typer.Option(help="Optimizer steps; 0 is one pass over the data.", min=0)]
Warmup = Annotated[int, typer.Option(help="Warm-up steps; at most a tenth of the steps.", min=0)]
BatchSize = Annotated[int, typer.Option(help="Answers in a step.", min=1)]
SequenceLength = Annotated[int, typer.Option(help="Tokens that are read.", min=16)]
ValidateEvery = Annotated[int, typer.Option(help="Steps between losses.", min=1)]
Seed = Annotated[int, typer.Option(help="Decides weights and order.")]
Device = Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")]


@app.command("draft-data")
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
            help='Lines of {"prompt": …} or {"messages": …}. Default: prompts of five kinds that '
            "were written for this script.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides prompts and answers.")] = 0,
    dtype: Annotated[str, typer.Option(help="vLLM's, of the target.")] = "auto",
    threads: Threads = 0,
) -> None:
    """Let the target answer prompts, and keep its distribution of every token."""
    _set_up_torch(threads)
    recipe = DraftDataRecipe(
        str(target.absolute()), str(prompts.absolute()) if prompts else None, answer, seed, dtype,
        digest(target, "*.safetensors"), digest(prompts.parent, prompts.name) if prompts else None,
    )  # fmt: skip
    with progress_bar("train_drafter:") as report:
        record = write_draft_data(recipe, texts, out, report)
    _write_json(out / "data.json", record)
    print(
        f"{record['answered_tokens']:,} tokens in {record['hours']:.2f} hours: "
        f"{record['tokens_per_second']:.0f} tokens/s"
    )
    learnt = sum(len(shard.ends) for shard in read_shards(out, "training"))
    if learnt < texts:
        print(f"note: {prompts} has prompts for {learnt} answers to learn from, not {texts}")


@app.command("train-draft")
def train_draft_model(
    data: Data,
    out: Out,
    shape: Annotated[str, typer.Option(help="HIDDENxLAYERSxHEADSxMLP.")] = "192x3x6x512",
    tokens: Tokens = 8_192,
    learning_rate: LearningRate = 3e-3,
    steps: Steps = 0,
    warmup: Warmup = 50,
    batch_size: BatchSize = 16,
    sequence_length: SequenceLength = 320,
    validate_every: ValidateEvery = 100,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Train a draft model on the target's answers."""
    sizes = shape.split("x")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
        raise SequoiaError(f"--shape {shape} is not HIDDENxLAYERSxHEADSxMLP, such as 256x4x4x672")
    hidden, layers, heads, mlp = map(int, sizes)
    if hidden % (2 * heads):  # rotary embeddings turn pairs of a head's dimensions
        raise SequoiaError(f"--shape {shape}: the hidden size is not a multiple of 2 × heads")
    recipe = Recipe(
        tokens, sequence_length, learning_rate, steps, warmup, batch_size, validate_every, seed,
        device,
    )  # fmt: skip
    _train(partial(train_draft, (hidden, layers, heads, mlp), recipe), data, out, threads)


@app.command("train-head")
def train_head_of_target(
    data: Data,
    out: Out,
    mlp: Annotated[int, typer.Option(help="Size of its MLP; 0: the target's.", min=0)] = 0,
    tokens: Tokens = 8_192,
    learning_rate: LearningRate = 1e-3,
    steps: Steps = 0,
    warmup: Warmup = 50,
    batch_size: BatchSize = 8,
    sequence_length: SequenceLength = 320,
    validate_every: ValidateEvery = 100,
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Train an EAGLE-3 head on the same answers."""
    recipe = Recipe(
        tokens, sequence_length, learning_rate, steps, warmup, batch_size, validate_every, seed,
        device,
    )  # fmt: skip
    _train(partial(train_head, mlp, recipe), data, out, threads)


def _set_up_torch(threads: int) -> None:
    transformers_logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)


def _train(
    train: Callable[[Path, Path, Report], dict[str, Any]], data: Path, out: Path, threads: int
) -> None:
    if (out / "config.json").is_file():
        raise SequoiaError(f"{out} has a trained drafter; choose a new folder")
    _set_up_torch(threads)
    with progress_bar("train_drafter:") as report:
        record = train(data, out, report)
    record["sha256"] = {
        "the weights": digest(out, "*.safetensors"),
        "the target's weights": digest(Path(record["target"]), "*.safetensors"),
        "the answers": digest(data, "*.npz"),
    }
    _write_json(out / "metrics.json", record)
    losses = (f"{one['loss']:.3f} after {one['step']:,} steps" for one in record["validation_loss"])
    print(f"loss on held-out answers: {', '.join(losses)}")


def _write_json(path: Path, record: dict[str, Any]) -> None:
    text = json.dumps({**record, "provenance": provenance()}, indent=2) + "\n"
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    with ends_by_signal():
        try:
            app()
        except SequoiaError as error:
            raise SystemExit(f"error: {error}") from error
