"""The check of kernels on GPUs, but for what needs one: its times."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.check import verification_times
from benchmarks.gpu.check.machine import Machine
from benchmarks.gpu.item_run import LOG
from benchmarks.gpu.results import FILE, GpuRunError, Results

ROOT = Path(__file__).parents[2]
# Where PyTorch, Triton and NumPy are, and nothing else that the project uses.
BARE = """
import sys
for name in ("vllm", "pydantic", "typer", "rich", "transformers", "matplotlib", "platformdirs"):
    sys.modules[name] = None
"""


# Forks: processes that start anew would find what is missing here.
PROGRAM = """
from benchmarks.gpu.command import main
sys.exit(main(sys.argv[1:], start_method="fork"))
"""


QUICK = "from tests.support.quicker import interpret_quickly; interpret_quickly()\n"


def run_python(code, *arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", QUICK + code, *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_program_checks_kernels_in_a_bare_checkout(tmp_path):
    """Everything but timing, by Triton's interpreter, where only PyTorch and Triton are."""
    arguments = ("--tiny", "--items", "kernels,plain-8b", "--output", tmp_path / "out")
    done = run_python(f"{BARE}\n{PROGRAM}", *arguments)
    results = Results(tmp_path / "out" / FILE)
    log = (tmp_path / "out" / LOG).read_text()[-4000:]
    assert done.returncode == 0, done.stderr[-4000:] + log
    assert results.of("plain-8b").skipped == "vLLM is not installed"
    assert results.of("kernels").state == "done"
    parts = results.of("kernels").parts
    names = " ".join(name for name, values in parts.items() if "limit" in values)
    for part in ("tree attention", "drawing", "dynamic", "verification", "commit", "law"):
        assert part in names
    times = " ".join(name for name, values in parts.items() if "seconds" in values)
    for part in (verification_times.DRAWING, verification_times.REJECTED, "tree attention"):
        assert part in times
    assert "interpreted: times mean nothing" in done.stdout
    checks = sum("limit" in values for values in parts.values())
    assert f"{checks} of {checks} checks right" in done.stdout


@pytest.mark.slow
@pytest.mark.sharded
def test_wrong_kernels_are_found(tmp_path):
    """Masks that ignore the tree, other random numbers, a commit that moves nothing."""
    code = f"""
import torch
from benchmarks.gpu.check import attention_check, sampling_check
from benchmarks.gpu.check.tree_batch import TreeBatch
from tests.support.attending import NodeMask
of = NodeMask.of
NodeMask.of = lambda seen, *window: of(torch.ones_like(seen).tril(), *window)
sampling_check.DRAW, sampling_check.VERIFY = sampling_check.VERIFY, sampling_check.DRAW
TreeBatch.commit = lambda *arguments: None
attention_check.time_attention = lambda *arguments: None
import sys
{PROGRAM}
"""
    done = run_python(code, "--tiny", "--items", "kernels", "--output", tmp_path / "out")
    assert done.returncode == 1, done.stderr[-4000:]
    wrong = " ".join(Results(tmp_path / "out" / FILE).of("kernels").errors)
    for part in ("tree attention", "drawing sampled", "verification sampled", "commit"):
        assert part in wrong
    assert "greedy" not in wrong
    assert "ERROR kernels, tree attention" in done.stdout


def test_the_interpreter_is_not_timed(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(GpuRunError, match="TRITON_INTERPRET=1 runs kernels in Python"):
        Machine.find(tiny=False)
