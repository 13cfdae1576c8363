"""SmolLM2-135M-Instruct as a folder that vLLM serves: fetched, converted, checked, cached."""

from pathlib import Path

import platformdirs

ORIGIN = "origin.json"
"""Written last into a folder: where the model came from. Without it a folder is not ours."""


class ModelError(Exception):
    """The model could not be had; the message says why, and what to do."""


def cached_folder() -> Path:
    """Where the model lies: ``~/.cache/sequoia-vllm/smollm2-135m-instruct`` on Linux."""
    cache = platformdirs.user_cache_dir("sequoia-vllm", appauthor=False)
    return Path(cache) / "smollm2-135m-instruct"


def is_cached(folder: Path) -> bool:
    return (folder / ORIGIN).is_file() and (folder / "model.safetensors").is_file()
