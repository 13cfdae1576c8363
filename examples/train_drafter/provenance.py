"""What was run, when and with what: written beside every measurement."""

import hashlib
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def provenance() -> dict[str, object]:
    """The command line, the date and the versions behind a result."""
    return {
        "argv": sys.argv,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def digest(folder: Path, pattern: str) -> str:
    """SHA-256 over the files of a folder that a pattern finds, in the order of their names."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    return found.hexdigest()
