"""SHA-256 of files, such as a model's weights."""

import hashlib
from functools import cache
from pathlib import Path


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal; computed again only after the file has changed."""
    stat = path.stat()
    return _hash_of(path, stat.st_mtime_ns, stat.st_size)


@cache
def _hash_of(path: Path, _mtime: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
