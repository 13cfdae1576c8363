"""Where the model lies in the user's cache directory."""

from pathlib import Path

import platformdirs

ORIGIN = "origin.json"
"""Written last into a folder: where the model came from. Without it a folder is not ours."""


def cached_folder() -> Path:
    """Where the model lies: ``~/.cache/sequoia-vllm/smollm2-135m-instruct`` on Linux."""
    cache = platformdirs.user_cache_dir("sequoia-vllm", appauthor=False)
    return Path(cache) / "smollm2-135m-instruct"


def is_cached(folder: Path) -> bool:
    """Whether an earlier run completed this folder."""
    return (folder / ORIGIN).is_file() and (folder / "model.safetensors").is_file()
