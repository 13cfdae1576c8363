"""The check of kernels on GPUs, but for what needs one: its times."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.check import verification_times
from benchmarks.gpu.check.command import CANNOT, WRONG, main
from benchmarks.gpu.check.machine import Machine
from benchmarks.gpu.check.report import (
    AttentionTime,
    GpuCheckError,
    GpuCheckReport,
    PartTime,
    StageReport,
)
from benchmarks.gpu.check.stage import StageRun
from benchmarks.gpu.check.timing import OnceTimer
from benchmarks.gpu.item_run import LOG
from benchmarks.gpu.results import FILE, Results

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
    report = GpuCheckReport.load(tmp_path / "out" / "kernels.json")
    assert report.interpreted
    assert report.passed
    names = " ".join(check.name for check in report.stages["kernels"].checks)
    for part in ("tree attention", "drawing", "verification", "commit", "law"):
        assert part in names
    assert {verification_times.DRAWING, verification_times.REJECTED} <= {
        time.part for time in report.stages["kernels"].parts
    }
    assert report.stages["kernels"].attention
    assert "interpreted: times mean nothing" in done.stdout
    assert f"{len(report.stages['kernels'].checks)} checks right" in done.stdout


@pytest.mark.slow
def test_wrong_kernels_are_found(tmp_path):
    """Masks that ignore the tree, other random numbers, a commit that moves nothing."""
    code = """
import sys, torch
from benchmarks.gpu.check import attention_check, command, sampling_check
from benchmarks.gpu.check.tree_batch import TreeBatch
of = attention_check.NodeMask.of
attention_check.NodeMask.of = lambda seen, *window: of(torch.ones_like(seen).tril(), *window)
sampling_check.DRAW, sampling_check.VERIFY = sampling_check.VERIFY, sampling_check.DRAW
TreeBatch.commit = lambda *arguments: None
attention_check.time_attention = lambda *arguments: None
sys.exit(command.main(sys.argv[1:]))
"""
    output = tmp_path / "report.json"
    done = run_python(code, "--tiny", "--output", output)
    assert done.returncode == WRONG, done.stderr[-4000:]
    stage = GpuCheckReport.load(output).stages["kernels"]
    wrong = " ".join(check.name for check in stage.checks if not check.passed)
    assert stage.failures == []
    for part in ("tree attention", "drawing sampled", "verification sampled", "commit"):
        assert part in wrong
    assert "greedy" not in wrong
    assert "WRONG" in done.stdout


def test_no_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "report.json"
    assert main(["--output", str(output)]) == CANNOT
    assert "no CUDA device" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "/nowhere/report.json"], "there is no folder /nowhere"),
        (["--report", "/nowhere/report.json"], "cannot read the GPU check's report"),
        ([], "TRITON_INTERPRET=1 runs kernels in Python"),
    ],
)
def test_refusals(arguments, message, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(arguments) == CANNOT
    assert message in capsys.readouterr().err


def test_example_and_command_are_the_same_check(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = "from sequoia_vllm.cli import main; main()"
    for words in (["examples/gpu_check.py"], ["-c", command, "gpu-check"]):
        done = subprocess.run(
            [sys.executable, *words, "--items", "none", "--output", tmp_path / "out"],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == CANNOT
        assert "no item 'none'; there are machine, rival, trees-8b-eagle3" in done.stderr


# -- the stage's bookkeeping ---------------------------------------------------------


def stage_run(say=lambda line: None):
    return StageRun(Machine(torch.device("cpu"), True), OnceTimer(), True, say)


def test_a_failure_does_not_end_a_stage():
    run = stage_run()
    with run.attempt("a part"):
        raise RuntimeError("out of registers")
    run.check("another", 0.0, 0.0)
    assert len(run.found.checks) == 1
    assert not run.found.passed
    assert "a part: RuntimeError: out of registers" in run.found.failures[0]
    assert Path(__file__).name in run.found.failures[0]


@pytest.mark.parametrize(
    ("error", "passed"), [(0.5, True), (1.5, False), (float("nan"), False), (float("inf"), False)]
)
def test_only_small_errors_pass(error, passed):
    run = stage_run()
    run.check("a check", error, 1.0)
    assert run.found.passed is passed
    json.dumps(dataclasses.asdict(run.found), allow_nan=False)


# -- reports ---------------------------------------------------------------------------


def measured_report():
    attention = AttentionTime(
        "llama-2-7b", 32, 32, 128, "bfloat16", 1, 8192, 64, 40e-6, 0.0, 10**8,
        bandwidth_floor=30e-6, arithmetic_floor=1e-6, copy_seconds=32e-6,
    )  # fmt: skip
    part = PartTime(verification_times.ACCEPTED, "", 1, 0, 64, 128256, 100e-6, 0.0)
    stages = {"kernels": StageReport(attention=[attention], parts=[part])}
    provenance = {"commit": "abc"}
    return GpuCheckReport("2026-01-31", "NVIDIA H200", False, provenance, 4e12, 7e14, stages)


def test_report_is_read_as_it_was_written(tmp_path):
    report = measured_report()
    path = tmp_path / "report.json"
    report.save(path)
    assert GpuCheckReport.load(path) == report


def test_the_report_of_an_earlier_version_is_shown(capsys):
    assert main(["--report", str(ROOT / "benchmarks" / "gpu" / "h100.json")]) == 0
    assert "steps: 8 of 8 checks right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other/v1"}, "this version reads 'sequoia-vllm/gpu-check/v1'"),
        ({"colour": 1}, "colour"),
        ({"date": None}, "date"),
        ({"stages": {"kernels": {"checks": [{"name": "a"}]}}}, "passed"),
    ],
)
def test_wrong_reports_are_refused(change, message, tmp_path):
    path = tmp_path / "report.json"
    measured_report().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(GpuCheckError, match=message):
        GpuCheckReport.load(path)
