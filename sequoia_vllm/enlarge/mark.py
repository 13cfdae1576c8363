"""The note in a grown model's config.json, so that no number measured on it passes for another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sequoia_vllm.errors import SequoiaError

MARK = "sequoia_grown"


class GrowError(SequoiaError, ValueError):
    """A model that cannot be grown as asked; the message names the fix."""


def grown_from(model: str | Path) -> dict[str, Any] | None:
    """What a model was grown from, or None if it is an ordinary one.

    Args:
        model: A folder, or a name on the Hugging Face Hub; of a name only the
            local copy is looked at.

    Returns:
        "from" and "from_sha256" (the small model), its "from_layers" and
        "from_intermediate_size", and "layers", "intermediate_size" and
        "parameters" of the grown one.
    """
    config = config_file(str(model))
    if config is None:
        return None
    try:
        mark = json.loads(config.read_text(encoding="utf-8")).get(MARK)
    except (OSError, ValueError, AttributeError):
        return None  # whoever loads the model says what is wrong with it
    return mark if isinstance(mark, dict) else None


def config_file(model: str) -> Path | None:
    """The config.json of a folder or, of a name, in the Hub's cache; None if it is not there."""
    if Path(model).is_dir():
        return Path(model) / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
