"""Synthetic targets: the cost of a larger model, the output of a small trained one.

``benchmarks/synthetic_target`` of a checkout writes them, with a note in config.json, so that no
figure measured on one passes for a trained model's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_KEY = "sequoia_grown"
"""Key of the note in config.json."""


def synthetic_origin(model: str | Path) -> dict[str, Any] | None:
    """Reads what a synthetic target was made from; None if the model is an ordinary one.

    Args:
        model: A folder, or a name on the Hugging Face Hub. Only the local copy of a name is read.

    Returns:
        "from" and "from_sha256" (the source), its "from_layers" and
        "from_intermediate_size", and "layers", "intermediate_size" and
        "parameters" of the synthetic target.
    """
    config = config_file(str(model))
    if config is None:
        return None
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get(CONFIG_KEY)
    except (OSError, ValueError, AttributeError):
        return None  # whoever loads the model says what is wrong with it
    return found if isinstance(found, dict) else None


def synthetic_models(target: str, draft: str) -> dict[str, Any]:
    """Which of "target" and "draft" are synthetic, and their `synthetic_origin`."""
    found = {"target": synthetic_origin(target), "draft": synthetic_origin(draft)}
    return {role: origin for role, origin in found.items() if origin is not None}


def config_file(model: str) -> Path | None:
    """Finds config.json in a folder or, by a model's name, in the Hub's cache; None: not there."""
    if Path(model).is_dir():
        return Path(model) / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
