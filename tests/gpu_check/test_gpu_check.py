"""The GPU check, but for what needs a GPU: its times, and that graphs can be captured."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.compiled.compiling import compile_variant
from benchmarks.compiled.model_variants import model_variants
from benchmarks.compiled.variant import SHARED_MEMORY_LIMITS
from benchmarks.gpu.check import step_times, verification_times
from benchmarks.gpu.check.command import CANNOT, WRONG, main
from benchmarks.gpu.check.goals import judge
from benchmarks.gpu.check.machine import Machine
from benchmarks.gpu.check.profile_of_report import profile_of
from benchmarks.gpu.check.report import (
    AttentionTime,
    GpuCheckError,
    GpuCheckReport,
    PartTime,
    StageReport,
)
from benchmarks.gpu.check.stage import StageRun
from benchmarks.gpu.check.timing import OnceTimer
from sequoia_vllm.hardware import CostModel
from sequoia_vllm.library.entries import model_class_of

ROOT = Path(__file__).parents[2]
# Where PyTorch, Triton and NumPy are, and nothing else that the project uses.
BARE = """
import sys
for name in ("vllm", "pydantic", "typer", "rich", "transformers", "matplotlib", "platformdirs"):
    sys.modules[name] = None
"""


QUICK = "from tests.support.quicker import interpret_quickly; interpret_quickly()\n"


def run_python(code, *arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", QUICK + code, *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_tiny_check_in_a_bare_checkout(tmp_path):
    """Everything but timing, by Triton's interpreter, where only PyTorch and Triton are."""
    code = f"{BARE}\nfrom benchmarks.gpu.check.command import main\nsys.exit(main(sys.argv[1:]))"
    output = tmp_path / "report.json"
    done = run_python(code, "--tiny", "--output", output)
    assert done.returncode == 0, done.stderr[-4000:]
    report = GpuCheckReport.load(output)
    assert report.interpreted
    assert report.passed
    assert list(report.stages) == ["kernels", "steps"]
    assert list(report.skipped) == ["engine"]
    assert report.goals == []
    names = " ".join(check.name for stage in report.stages.values() for check in stage.checks)
    for part in ("tree attention", "drawing", "verification", "commit", "law", "graph", "greedy"):
        assert part in names
    parts = {time.part for stage in report.stages.values() for time in stage.parts}
    assert {step_times.PLAIN_STEP, step_times.TREE_STEP, step_times.DRAFT_LEVEL} <= parts
    assert report.stages["kernels"].attention
    assert report.stages["steps"].facts["decoding_tokens_per_step"] > 1
    assert "interpreted: times mean nothing" in done.stdout


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
    done = run_python(code, "--tiny", "--stages", "kernels", "--output", output)
    assert done.returncode == WRONG, done.stderr[-4000:]
    stage = GpuCheckReport.load(output).stages["kernels"]
    wrong = " ".join(check.name for check in stage.checks if not check.passed)
    assert stage.failures == []
    for part in ("tree attention", "drawing sampled", "verification sampled", "commit"):
        assert part in wrong
    assert "greedy" not in wrong
    assert "WRONG" in done.stdout


@pytest.mark.slow
def test_a_commit_that_moves_nothing_changes_what_is_decoded():
    code = """
import torch
from benchmarks.gpu.check import decoding
from benchmarks.gpu.check.tree_batch import TreeBatch
from benchmarks.gpu.check.machine import Machine
from benchmarks.gpu.check.stage import StageRun
from benchmarks.gpu.check.timing import OnceTimer
TreeBatch.commit = lambda *arguments: None
run = StageRun(Machine.find(tiny=True), OnceTimer(), True, print)
decoding.check_decoding(run)
assert not run.found.failures
print(sum(not check.passed for check in run.found.checks), "wrong")
"""
    done = run_python(code)
    assert done.stdout.splitlines()[-1] == "1 wrong", done.stderr[-4000:] + done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["slots.zero_()", "token_ids.add_(1)"])
def test_growth_that_reads_something_else_drafts_something_else(mistake):
    """Decoding stays right, but a target's own drafts are no longer accepted."""
    code = f"""
import torch
from sequoia_vllm.drafting.growth import TreeGrowth
from benchmarks.gpu.check import decoding
from benchmarks.gpu.check.machine import Machine
from benchmarks.gpu.check.stage import StageRun
from benchmarks.gpu.check.timing import OnceTimer
forward = TreeGrowth._forward
def mistaken(self, *arguments):
    self._inputs.{mistake}
    return forward(self, *arguments)
TreeGrowth._forward = mistaken
run = StageRun(Machine.find(tiny=True), OnceTimer(), True, print)
decoding.check_decoding(run)
assert not run.found.failures
print([check.name for check in run.found.checks if not check.passed])
"""
    done = run_python(code)
    wrong = done.stdout.splitlines()[-1]
    assert "accepted tokens that is missing" in wrong, done.stderr[-4000:] + done.stdout
    assert "unlike plain" not in wrong


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
        (["--stages", "kernels,everything"], "no stage 'everything'; there are kernels"),
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
            [sys.executable, *words, "--stages", "none", "--output", tmp_path / "report.json"],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == CANNOT
        assert "no stage 'none'" in done.stderr


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


# -- reports, goals and profiles -----------------------------------------------------


def part(name, seconds, *, model="", batch=1, context=0, tokens=1, vocabulary=0):
    return PartTime(name, model, batch, context, tokens, vocabulary, seconds, 0.0)


def attention(seconds, nodes=64, context=8192):
    return AttentionTime(
        "llama-2-7b", 32, 32, 128, "bfloat16", 1, context, nodes, seconds, 0.0, 10**8,
        bandwidth_floor=30e-6, arithmetic_floor=1e-6, copy_seconds=32e-6,
    )  # fmt: skip


def measured_report():
    """A report like one from a GPU where scoring 64 nodes takes a tenth longer than one."""
    kernels = StageReport(
        attention=[attention(40e-6), attention(1.0, nodes=16), attention(1.0, context=512)],
        parts=[
            part(verification_times.ACCEPTED, 100e-6, vocabulary=128256),
            part(verification_times.REJECTED, 160e-6, vocabulary=128256),
            part(verification_times.REJECTED, 1.0, vocabulary=128256, batch=8),
            part(verification_times.REJECTED, 1.0, vocabulary=32000),
        ],
    )
    steps = StageReport(
        parts=[
            part(step_times.PLAIN_STEP, 4e-3, context=1024),
            part(step_times.TREE_STEP, 4.4e-3, context=1024, tokens=64),
            part(step_times.TREE_STEP, 1.0, context=8192, tokens=64),
            part(step_times.DRAFT_LEVEL, 0.1e-3, vocabulary=32000),
            part(step_times.DRAFT_LEVEL, 0.2e-3, vocabulary=32000, tokens=9),
        ]
    )
    for batch in (1, 4):
        for tokens in (64, 1, 8):  # a profile sorts them
            where = {"batch": batch, "context": 1024, "tokens": tokens}
            steps.parts.append(part(step_times.TARGET_CURVE, (4 + tokens / 160) * 1e-3, **where))
            steps.parts.append(part(step_times.LEVEL_CURVE, 0.2e-3, **where))
            if tokens > 1:
                steps.parts.append(part(step_times.VERIFICATION_CURVE, 50e-6, **where))
                steps.parts.append(part(step_times.COMMIT, tokens * 1e-6, **where))
    return GpuCheckReport(
        "2026-01-31", "NVIDIA H200", False, {"commit": "abc"}, 4e12, 7e14,
        {"kernels": kernels, "steps": steps},
    )  # fmt: skip


def test_goals():
    goals = {goal.name: goal for goal in judge(measured_report())}
    found = {name: (round(goal.measured, 6), goal.met) for name, goal in goals.items()}
    assert found == {
        "tree attention llama-2-7b, bfloat16 cache, batch 1, 64 nodes, context 8192: "
        "of copy bandwidth": (75.0, True),
        "verification, batch 1, vocabulary 128256": (0.16, False),
        "tree step of 64 nodes, context 1024: of a plain step": (1.1, True),
        "slowest draft level, vocabulary 32000": (0.2, True),
    }


def test_goal_of_the_engine():
    report = measured_report()
    result = {"method": "Sequoia 64x8", "batch_size": 1, "temperature": 0.0}
    results = [{**result, "measured_over_predicted": 0.85}, {**result, "method": "chain of 4"}]
    report.stages = {"engine": StageReport(facts={"bench": {"results": results}})}
    (goal,) = judge(report)
    assert (goal.measured, goal.limit, goal.bound, goal.met) == (85.0, 90.0, "at least", False)


def test_report_is_read_as_it_was_written(tmp_path):
    report = measured_report()
    report.goals = judge(report)
    path = tmp_path / "report.json"
    report.save(path)
    assert GpuCheckReport.load(path) == report


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


def test_profile_for_the_library(tmp_path):
    """Written by the command, of the library's class, and enough to choose trees from."""
    report, output = tmp_path / "report.json", tmp_path / "profile.json"
    measured_report().save(report)
    assert main(["--report", str(report), "--profile", str(output)]) == 0
    profile = profile_of(GpuCheckReport.load(report))
    assert json.loads(output.read_text()) == profile.to_dict()
    assert (profile.source, profile.device) == ("measured", "NVIDIA H200")
    assert model_class_of(profile) == "7b-68m"
    assert profile.provenance["commit"] == "abc"
    assert "no engine" in profile.provenance["measured_with"]
    cost = CostModel(profile)
    assert cost.max_tokens(4) == 64
    assert cost.target_seconds(64, 1) == pytest.approx(4.4e-3)
    assert cost.verification_seconds(8, 4) == pytest.approx(50e-6)
    # Assumed, and the slowest commit.
    assert cost.tree_overhead(1) == pytest.approx(600e-6 + 64e-6)
    assert profile.assumptions == {"plain_step_seconds": 300e-6, "tree_step_seconds": 600e-6}


def test_no_profile_without_times():
    report = measured_report()
    report.interpreted = True
    with pytest.raises(GpuCheckError, match="no times to make a profile of"):
        profile_of(report)
    with pytest.raises(GpuCheckError, match="run stage steps"):
        profile_of(dataclasses.replace(measured_report(), stages={}))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")
@pytest.mark.parametrize("variant", model_variants(), ids=lambda variant: variant.name)
def test_kernels_of_the_models_compile(variant):
    found = compile_variant(variant, 90)
    assert found.spilled_bytes == 0
    assert found.shared_bytes <= SHARED_MEMORY_LIMITS[90]
