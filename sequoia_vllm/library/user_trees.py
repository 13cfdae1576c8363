"""Keys of the user's own trees."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path


def user_tree_name(
    device_name: str, target: str, draft: str, dtype: str, tensor_parallel_size: int
) -> str:
    """File name (without ``.json``) of the tree tuned for exactly this.

    Readable, and followed by a digest of the whole key, since different paths
    may look alike once shortened. A model's directory is one model, however
    the path to it is written.
    """
    key = [
        device_name.strip(), model_key(target), model_key(draft), dtype,
        f"tp{tensor_parallel_size}",
    ]  # fmt: skip
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:8]
    return "--".join([*(_slug(part) for part in key), digest])


def model_key(model: str) -> str:
    """One writing of a model's name or directory."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model.rstrip("/")


def same_model(stored: str, given: str) -> bool:
    """Whether two model names mean the same model.

    A stored relative path (``examples/models/target``) also means any absolute
    path that ends in it.
    """
    stored, given = stored.strip("/"), given.rstrip("/")
    return given.lstrip("/") == stored or given.endswith(f"/{stored}")


def _slug(text: str) -> str:
    """Its last 40 characters, as they can stand in a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")[-40:].strip("-") or "x"
