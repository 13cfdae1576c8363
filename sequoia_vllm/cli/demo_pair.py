"""The demo's models: a real chat model and its draft, or the small pair from the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import platformdirs

from sequoia_vllm.cli.common import note

_PACKAGE = Path(__file__).parents[1]


class DemoPair(NamedTuple):
    """What the demo runs: models, prompts (None: the built-in questions) and Sequoia's tree."""

    target: str
    draft: str
    prompts: Path | None
    tree: str


def shipped_models(package: Path = _PACKAGE) -> Path:
    """Finds the small pair: inside the package, or beside it in a checkout."""
    inside = package / "examples" / "models"
    return inside if inside.is_dir() else package.parent / "examples" / "models"


MODELS = shipped_models()
EMBEDDED = DemoPair(str(MODELS / "target"), str(MODELS / "draft"), MODELS / "prompts.jsonl", "16x4")


def chosen_pair(checkout: Path = _PACKAGE.parent) -> DemoPair:
    """SmolLM2 and its draft in a checkout, fetched at first use; else the small pair."""
    draft = checkout / "examples" / "models" / "smollm2-draft"
    if not (draft / "config.json").is_file():
        note("the small pair runs: in a clone of the repository, demo runs a real chat model")
        return EMBEDDED
    cache = Path(platformdirs.user_cache_dir("sequoia-vllm", appauthor=False))
    target = cache / "smollm2-135m-instruct"
    if not (target / "origin.json").is_file():
        note("fetching SmolLM2-135M-Instruct, once: 93 MB")
        command = [sys.executable, "-m", "examples.smollm2", "--out", str(target)]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().rpartition("error: ")[2] or "it was interrupted"
            note(f"the small pair runs: SmolLM2 cannot be had ({' '.join(reason.split())})")
            return EMBEDDED
    return DemoPair(str(target), str(draft), None, "auto")
