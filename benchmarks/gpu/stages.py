"""Items without made-up weights: the machine, the kernels, and `sequoia-vllm bench`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.item_run import ItemRun

if TYPE_CHECKING:
    from sequoia_vllm.bench.rounds import BenchSettings

_MODELS = Path(__file__).parents[2] / "examples" / "models"
_TARGET_PARAMETERS, _DRAFT_PARAMETERS = 6.74e9, 68e6
_TARGET_HIDDEN = 4096  # 16 times the trained target's, so MLPs are no wider than usual (8,192)
_PROMPTS, _MAX_TOKENS, _ROUNDS = 4, 128, 3
_CHAINS = ["4"]
_TREES = ["16x5", "64x8"]


def describe_machine(run: ItemRun) -> None:
    """Keeps what all results are of: card, driver, versions, commit."""
    from benchmarks.gpu.check.machine import Machine

    machine = Machine.find(run.tiny)
    found = machine.provenance()
    run.record("machine", {
        "device": machine.name,
        "interpreted": machine.interpreted,
        "weights": "dummy: logits are nearly flat, so nothing about acceptance follows",
        **{name: value for name, value in found.items() if name != "device"},
        "properties": found["device"],
    })  # fmt: skip


def check_kernels(run: ItemRun) -> None:
    """Checks and times every kernel; the report is ``kernels.json`` in the run's folder."""
    from benchmarks.gpu.check.command import run_check
    from benchmarks.gpu.check.table import lines_of

    report = run_check(run.folder / "kernels.json", run.tiny)
    stage = report.stages["kernels"]
    right = sum(check.passed for check in stage.checks)
    run.record("kernels", {
        "checks": len(stage.checks), "right": right, "failures": stage.failures,
        "lines": lines_of(report),
    })  # fmt: skip
    if not report.passed:
        with run.attempt("checks"):
            raise AssertionError(f"{len(stage.checks) - right} checks wrong, see kernels.json")


def compare_methods(run: ItemRun) -> None:
    """Plain vLLM, its chain and trees, on a synthetic target made of the trained pair."""
    from sequoia_vllm.measuring.engine_processes import engines_end_here

    with tempfile.TemporaryDirectory() as folder, engines_end_here():
        run.measure("bench", lambda: _compared(_settings(*_synthetic(Path(folder)))))


def _synthetic(folder: Path) -> tuple[str, str]:
    from benchmarks.synthetic_target.write import write_synthetic_target

    folders = []
    sizes = {"target": (_TARGET_PARAMETERS, _TARGET_HIDDEN), "draft": (_DRAFT_PARAMETERS, None)}
    for role, (size, hidden) in sizes.items():
        made = write_synthetic_target(
            str(_MODELS / role), folder / role, parameters=size, hidden=hidden, dtype="bfloat16"
        )
        folders.append(str(made.folder))
    return folders[0], folders[1]


def _settings(target: str, draft: str) -> BenchSettings:
    from sequoia_vllm.bench.methods import methods
    from sequoia_vllm.bench.rounds import BenchSettings
    from sequoia_vllm.measuring.engines import EngineSpec
    from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

    prompts = load_prompts(None, _PROMPTS)
    return BenchSettings(
        EngineSpec(target, draft),
        methods=tuple(methods(draft, _CHAINS, _TREES)),
        prompts=tuple(encode_prompts(prompts, load_tokenizer(target), raw=False)),
        temperatures=(0.0, 1.0),
        max_tokens=_MAX_TOKENS,
        rounds=_ROUNDS,
    )


def _compared(settings: BenchSettings) -> dict[str, object]:
    from sequoia_vllm.bench.predict import PredictionBasis
    from sequoia_vllm.bench.run import run_bench

    def progress(what: str, done: int, total: int) -> None:
        print(f"bench: {what} ({done} of {total})", flush=True)

    basis = PredictionBasis.measured(settings, None, False, progress)
    described = {"max_tokens": settings.max_tokens, "rounds": settings.rounds}
    report = run_bench(settings, basis, described, progress)
    wrong = 0
    if report.greedy is not None:
        wrong = sum(not mismatch.near_tie for mismatch in report.greedy.mismatches)
    return {
        "greedy_outputs_unlike_plain": wrong,
        "report": report.to_dict(),
        "profile": basis.profile.to_dict(),
    }
