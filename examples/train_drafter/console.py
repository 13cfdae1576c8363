"""What the commands share: options, torch's set-up, progress on the terminal, files."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from shapes import Shape
from training import Listener
from transformers.utils import logging as transformers_logging

from sequoia_vllm.cli.common import progress_bar

console = Console()

Device = Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")]
Threads = Annotated[int, typer.Option(help="CPU threads of torch; 0 leaves its default.", min=0)]
Steps = Annotated[int, typer.Option(help="Optimizer steps; 0 is one pass over the data.", min=0)]
Warmup = Annotated[int, typer.Option(help="Warm-up steps; at most a tenth of the steps.", min=0)]
BatchSize = Annotated[int, typer.Option(help="Sequences in a step.", min=1)]
ShapeOption = Annotated[
    Shape, typer.Option(help="HIDDENxLAYERSxHEADSxMLP.", parser=Shape.parse, metavar="SHAPE")
]
Numbers = Annotated[Path | None, typer.Option(help="Where to write the numbers as JSON.")]
ValidateEvery = Annotated[int, typer.Option(help="Steps between losses.", min=1)]


def set_up_torch(threads: int) -> None:
    """Sets the number of threads, and turns bars of transformers off."""
    transformers_logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)


@contextmanager
def progress() -> Iterator[Listener]:
    """Shows each stage with its latest loss: a bar on a terminal, else a line every half minute."""
    stage, done, total = "", 0, 0

    with progress_bar("train_drafter:") as report:

        def start(name: str, steps: int | None) -> None:
            nonlocal stage, done, total
            stage, done, total = name, 0, steps or 0
            report(stage, done, total)

        def advance(loss: float | None) -> None:
            nonlocal done
            done += 1
            report(stage if loss is None else f"{stage}, loss {loss:.3f}", done, total)

        yield Listener(start, advance)


@contextmanager
def counting(total: int) -> Iterator[Callable[[], None]]:
    """Shows the progress of an evaluation: each call counts one prompt."""
    with progress() as listener:
        listener.on_stage("evaluation", total)
        yield lambda: listener.on_step(None)


def write_json(path: Path, content: dict[str, object]) -> None:
    """Indented, with a line's end."""
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
