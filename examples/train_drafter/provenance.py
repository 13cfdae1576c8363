"""What was run, when and with what: written beside every measurement."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version

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
