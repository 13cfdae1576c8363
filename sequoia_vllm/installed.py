"""What is installed and lies here: versions of distributions, a checkout, and hashes of files."""

import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGE = Path(__file__).parent
_IS_OURS = 'name = "sequoia-vllm"'


def installed(name: str) -> str | None:
    """The version of the distribution of this name; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those of these distributions that are installed, by name."""
    found = {name: installed(name) for name in names}
    return {name: number for name, number in found.items() if number is not None}


def find_checkout() -> Path | None:
    """The root of the checkout of this repository, which has more than the installed package: that
    which the package lies in, or the current directory. None: there is none."""
    here = Path.cwd()
    return next(filter(_is_checkout, (_PACKAGE.parent, here, *here.parents)), None)


def _is_checkout(folder: Path) -> bool:
    try:
        project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return _IS_OURS in project.splitlines()


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal; computed again only after the file has changed."""
    stat = path.stat()
    return _hash_of(path, stat.st_mtime_ns, stat.st_size)


@cache
def _hash_of(path: Path, _mtime: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
