"""Items without made-up weights: the machine, the kernels, and `sequoia-vllm bench`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.item_run import ItemRun
from benchmarks.gpu.results import GpuRunError

if TYPE_CHECKING:
    from sequoia_vllm.bench.rounds import BenchSettings

_EXAMPLES = Path(__file__).parents[2] / "examples"
_DRAFT = _EXAMPLES / "models" / "smollm2-draft"
_QUESTIONS = _EXAMPLES / "smollm2" / "questions.jsonl"
# Llama-3.1-8B's layers and MLPs; the hidden size is a multiple of SmolLM2's.
_LAYERS, _WIDTH, _HIDDEN = 32, 14336, 4032
_PROMPTS, _MAX_TOKENS, _ROUNDS = 12, 64, 3
_CACHE_GIB = 1.7  # four engines share the device
_CHAINS = ["6", "3:probabilistic:block"]
_BATCHES, _TEMPERATURES = (1, 8, 32), (0.0, 0.6)


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
    """Plain vLLM, its chains and trees, on a chat model at the cost of one of 8B parameters."""
    from sequoia_vllm.measuring.engine_processes import engines_end_here

    with tempfile.TemporaryDirectory() as folder, engines_end_here():
        run.measure("bench", lambda: _compared(_settings(*_models(Path(folder)))))


def _models(folder: Path) -> tuple[str, str]:
    """The enlarged target, and its draft with the target's whole vocabulary.

    Raises:
        GpuRunError: The chat model is not in the cache directory.
    """
    from benchmarks.synthetic_target.write import write_synthetic_target
    from benchmarks.whole_vocabulary import matching_of, write
    from examples.smollm2.cache import cached_folder, is_cached

    if not is_cached(chat := cached_folder()):
        raise GpuRunError(f"{chat} is not there: run python -m examples.smollm2 first")
    made = write_synthetic_target(
        str(chat), folder / "target", layers=_LAYERS, width=_WIDTH, hidden=_HIDDEN, dtype="bfloat16"
    )
    target = str(made.folder)
    write(target, _DRAFT, folder / "draft", matching_of(target, _DRAFT))
    return target, str(folder / "draft")


def _settings(target: str, draft: str) -> BenchSettings:
    from sequoia_vllm.bench.methods import AUTO, methods
    from sequoia_vllm.bench.rounds import BenchSettings
    from sequoia_vllm.measuring.engines import EngineSpec
    from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

    prompts = load_prompts(_QUESTIONS, _PROMPTS)
    return BenchSettings(
        EngineSpec(target, draft, kv_cache_gib=_CACHE_GIB),
        methods=tuple(methods(draft, _CHAINS, [AUTO])),
        prompts=tuple(encode_prompts(prompts, load_tokenizer(target), raw=False)),
        batch_sizes=_BATCHES,
        temperatures=_TEMPERATURES,
        max_tokens=_MAX_TOKENS,
        rounds=_ROUNDS,
    )


def _compared(settings: BenchSettings) -> dict[str, object]:
    from sequoia_vllm.bench.run import run_bench

    def progress(what: str, done: int, total: int) -> None:
        print(f"bench: {what} ({done} of {total})", flush=True)

    described = {"max_tokens": settings.max_tokens, "rounds": settings.rounds}
    report = run_bench(settings, None, described, progress)
    wrong = 0
    if report.greedy is not None:
        wrong = sum(not mismatch.near_tie for mismatch in report.greedy.mismatches)
    return {
        "greedy_outputs_unlike_plain": wrong,
        "report": report.to_dict(),
    }
