"""`tune` over a trained head: acceptance is counted and passes are timed as of a draft model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.heads import EAGLE3
from tests.support.models import TARGET
from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

# As little as can be.
LITTLE = [
    "--quick", "--eager", "--dtype", "float32", "--max-tokens-total", "64", "--batch-sizes", "1",
    "--tokens", "1,4", "--context", "64", "--kv-cache-gib", "0.05",
]  # fmt: skip


def tune(library: str) -> dict[str, Any]:
    """What the command prints, and what it keeps."""
    import os

    from typer.testing import CliRunner

    from sequoia_vllm.cli import app

    os.environ["SEQUOIA_VLLM_TREES"] = library
    pair = ["--model", TARGET, "--draft-model", EAGLE3]
    done = CliRunner().invoke(app, ["tune", *pair, *LITTLE, "--json"])
    if done.exit_code:
        raise RuntimeError(done.output) from done.exception
    kept = {path.name: json.loads(path.read_text()) for path in Path(library).rglob("*.json")}
    return {"printed": json.loads(done.stdout), "kept": list(kept.values())}


def test_tune_measures_a_head(tmp_path):
    found = call_on_v2(tune, tmp_path, library=str(tmp_path / "trees"))
    assert found["printed"]["draft"] == EAGLE3
    [acceptance] = [file for file in found["kept"] if "trials" in file]
    [profile] = [file for file in found["kept"] if "draft_level" in file]
    # It was trained: its first choice is often right.
    assert np.ravel(acceptance["acceptance"])[0] > 0.3
    assert np.ravel(acceptance["trials"])[0] > 10
    [levels] = profile["draft_level"]
    assert min(levels["seconds"]) > 0
    assert Path(found["printed"]["file"]).is_file()
