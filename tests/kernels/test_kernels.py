"""Runs the tests of the Triton kernels under Triton's interpreter, in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and other tests compile kernels.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Ends what hangs. A slow machine took more than 400 s.
MOST_SECONDS = 1200
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MOST_SECONDS + 60)]

ROOT = Path(__file__).parents[2]
FILES = {
    file.stem.removeprefix("test_").removesuffix("_interpreted"): file
    for files in ("kernels/test_*_interpreted.py", "ops/test_*.py")
    for file in sorted((ROOT / "tests").glob(files))
}
# These have processes of their own; most others take less time than a process's imports.
LONG = ["attend", "children", "mutants", "recurrent_tree", "tree_attention", "verify"]
NAMES = {**{name: [name] for name in LONG}, "others": sorted(FILES.keys() - LONG)}


# Hand-made mistakes; layers that Qwen3-Next has in `tests/v2/test_recurrent_v2.py`; what is marked.
OF_SHARDS = ("mutants", "recurrent_tree", "sharded")


@pytest.mark.parametrize(
    "names",
    [n for n in NAMES if n not in OF_SHARDS]
    + [pytest.param(n, marks=pytest.mark.sharded) for n in OF_SHARDS],
)
def test_kernels_interpreted(names):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    marked = "sharded" if names == "sharded" else "not sharded"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked]
    done = subprocess.run(
        [*command, *(str(FILES[name]) for name in NAMES.get(names, FILES))],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
