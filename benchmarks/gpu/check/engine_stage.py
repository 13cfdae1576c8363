"""The full engine: plain vLLM, its chain and trees, on a synthetic target of 7B parameters."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.check.report import GpuCheckError
from benchmarks.gpu.check.stage import StageRun

if TYPE_CHECKING:
    from sequoia_vllm.bench.rounds import BenchSettings

_TARGET_PARAMETERS, _DRAFT_PARAMETERS = "6.74B", "68M"
_PROMPTS, _MAX_TOKENS, _ROUNDS = 4, 128, 3
_CHAINS = ["4"]
_TREES = ["16x5", "64x8"]


def why_not(tiny: bool) -> str | None:
    """Why there can be no engine here; None: there can."""
    if tiny:
        return "not part of a tiny check"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None


def run_engine(run: StageRun, models: Path) -> None:
    """Compares methods on synthetic models made of the pair in ``models`` ("target" and "draft").

    Raises:
        GpuCheckError: If the pair is not there.
    """
    if not (models / "target" / "config.json").is_file():
        raise GpuCheckError(f"{models}: no pair there; give --models the folder of a pair")
    from sequoia_vllm.measuring.engine_processes import engines_end_here

    with run.attempt("engine"), tempfile.TemporaryDirectory() as folder, engines_end_here():
        target, draft = _synthetic(run, models, Path(folder))
        settings = _settings(target, draft)
        _compare(run, settings)


def _synthetic(run: StageRun, models: Path, folder: Path) -> tuple[str, str]:
    from sequoia_vllm.measuring.synthetic_target import make_synthetic_target

    folders = []
    for role, size in (("target", _TARGET_PARAMETERS), ("draft", _DRAFT_PARAMETERS)):
        made = make_synthetic_target(
            str(models / role), folder / role, "--params", size, "--dtype", "bfloat16"
        )
        run.say(f"synthetic {role} of {made['parameters']:,} parameters")
        folders.append(str(made["folder"]))
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


def _compare(run: StageRun, settings: BenchSettings) -> None:
    from sequoia_vllm.bench.predict import PredictionBasis
    from sequoia_vllm.bench.run import run_bench

    def progress(what: str, done: int, total: int) -> None:
        run.say(f"engine: {what} ({done} of {total})")

    basis = PredictionBasis.measured(settings, None, False, progress)
    described = {"max_tokens": settings.max_tokens, "rounds": settings.rounds}
    report = run_bench(settings, basis, described, progress)
    run.found.facts["bench"] = report.to_dict()
    run.found.facts["profile"] = basis.profile.to_dict()
    if report.greedy is not None:
        wrong = sum(not mismatch.near_tie for mismatch in report.greedy.mismatches)
        run.check("greedy outputs unlike plain vLLM's that rounding cannot explain", wrong, 0)
