"""Runs the tests of the Triton kernels under Triton's interpreter, in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and other tests compile kernels.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "kernels").glob("test_*_interpreted.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_interpreted(file):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_every_kernel_has_tests():
    tested = {file.stem.removeprefix("test_").removesuffix("_interpreted") for file in FILES}
    drafting = {"children", "begin_drafting", "draft_inputs"}
    assert {"tree_attention", "scoring_inputs", "verify", "commit"} | drafting <= tested
