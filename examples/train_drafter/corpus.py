"""Which Python files a pair learns from, and which ones it is validated on."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from errors import PairError

MIN_CHARS, MAX_CHARS = 200, 200_000


@dataclass(frozen=True)
class Corpus:
    """Files without duplicates, in random order; the last ones are for validation."""

    training: list[Path]
    validation: list[Path]


def default_folders() -> list[Path]:
    """The running Python's standard library and its installed packages."""
    paths = sysconfig.get_paths()
    return [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]


def collect(folders: Sequence[Path], *, max_files: int, validation_files: int, seed: int) -> Corpus:
    """Draws at most ``max_files`` different files from the folders.

    At most a tenth of them are kept for validation.

    Raises:
        PairError: If there are too few files for both parts.
    """
    candidates = _python_files(folders)
    np.random.default_rng(seed).shuffle(candidates)
    files = list(_without_duplicates(candidates, max_files))
    held_out = min(validation_files, len(files) // 10)
    if held_out == 0:
        raise PairError(
            f"{len(files)} usable Python files in {', '.join(map(str, folders))}: at least 10 "
            f"different files of {MIN_CHARS:,} to {MAX_CHARS:,} characters are needed"
        )
    return Corpus(training=files[:-held_out], validation=files[-held_out:])


def read_texts(files: Iterable[Path]) -> Iterator[str]:
    """The files' texts, one at a time."""
    for file in files:
        yield file.read_text(encoding="utf-8")


def _python_files(folders: Iterable[Path]) -> list[Path]:
    """Every ``.py`` file below the folders once, sorted so that the seed decides the order."""
    return sorted({file.resolve() for folder in folders for file in folder.rglob("*.py")})


def _without_duplicates(files: Iterable[Path], max_files: int) -> Iterator[Path]:
    """The first ``max_files`` files of usable size whose content was not seen before."""
    seen: set[bytes] = set()
    for file in files:
        if len(seen) == max_files:
            return
        digest = _digest_if_usable(file)
        if digest is not None and digest not in seen:
            seen.add(digest)
            yield file


def _digest_if_usable(file: Path) -> bytes | None:
    """The content's hash, or None if the file is unreadable, too short or too long."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not MIN_CHARS <= len(text) <= MAX_CHARS:
        return None
    return hashlib.sha256(text.encode()).digest()
