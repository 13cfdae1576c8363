"""Synthetic targets: the cost of a larger model, the output of a small trained one.

``benchmarks/synthetic_target`` of a checkout writes them, with a note in config.json, so that no
figure measured on one passes for a trained model's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from sequoia_vllm.errors import SequoiaError

CONFIG_KEY = "sequoia_grown"
"""Key of the note in config.json."""

_CHECKOUT = Path(__file__).parents[2]


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


def make_synthetic_target(source: str, folder: Path, *options: str) -> dict[str, Any]:
    """Runs the checkout's ``benchmarks.synthetic_target``; its progress goes to standard error.

    Args:
        source: The small model: a folder, or a name on the Hub.
        folder: Where the synthetic target goes.
        options: More of its command line, such as ``"--params", "800M"``.

    Returns:
        What it prints: "folder", "parameters" and more.

    Raises:
        SequoiaError: There is no checkout, or the program failed.
    """
    if not (_CHECKOUT / "benchmarks" / "synthetic_target").is_dir():
        raise SequoiaError(
            "synthetic targets are made by benchmarks/synthetic_target, which is not part of the "
            "installed package: clone the repository, and run this command from its checkout "
            "(pip install -e .)"
        )
    source = str(Path(source).absolute()) if Path(source).is_dir() else source
    words = [source, str(folder.absolute()), "--no-check", "--json", *options]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.synthetic_target", *words],
        cwd=_CHECKOUT, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SequoiaError(f"no synthetic target was made of {source}: see the error above")
    made: dict[str, Any] = json.loads(done.stdout)
    return made


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
