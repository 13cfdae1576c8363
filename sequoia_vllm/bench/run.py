"""Runs a whole comparison: measures it, sums it up, and adds its provenance."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from statistics import median
from typing import Any

from sequoia_vllm.bench.engines import PARTS
from sequoia_vllm.bench.measure import BenchRuns, MethodRuns, Opener, measure
from sequoia_vllm.bench.methods import Kind
from sequoia_vllm.bench.report import (
    BenchModel,
    BenchReport,
    Result,
    Spread,
    StepSplit,
    disagreement,
)
from sequoia_vllm.bench.rounds import BenchSettings, EngineCase, RoundRun, pooled
from sequoia_vllm.measuring.engines import Progress
from sequoia_vllm.measuring.provenance import model_hashes, provenance, synthetic_origin

# Environment variables that change speed on CPUs.
_ENVIRONMENT = (
    "LD_PRELOAD", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_SGL_KERNEL", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
CHAIN_SAMPLES_WRONGLY = (
    "vLLM's chain samples wrongly at temperatures above 0 on CPUs without Triton "
    "(vllm-project/vllm#55005). Its tokens are not the target's, and it accepts fewer drafts than "
    "it should. So its speed there says nothing of vLLM's chain elsewhere"
)
DECLINED = "the engine chose not to speculate here"


def run_bench(
    settings: BenchSettings,
    described: dict[str, Any],
    progress: Progress | None = None,
    opener: Opener | None = None,
) -> BenchReport:
    """Measures, and sums it up. Raises BenchError or CalibrationError if something cannot be
    measured."""
    engine = settings.engine
    found = measure(settings, progress, opener)
    stated = provenance(
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )
    target, draft = (
        BenchModel(name=name, hashes=model_hashes(name), grown_from=synthetic_origin(name))
        for name in (engine.target, engine.draft)
    )
    summed = results(found, chain_is_wrong=chain_samples_wrongly())
    synthetic = [synthetic_note(model) for model in (target, draft)]
    return BenchReport(
        date=datetime.datetime.now(datetime.UTC).date(),
        device=stated["device"],
        target=target,
        draft=draft,
        dtype=found.dtype,
        settings=described,
        results=summed,
        greedy=found.greedy,
        notes=[note for note in (*synthetic, disagreement(summed)) if note is not None],
        provenance=stated,
    )


def results(found: BenchRuns, *, chain_is_wrong: bool) -> list[Result]:
    """Results of each method in each case."""
    summed = []
    for case, runs in found.runs.items():
        chains = [one for one in runs if one.method.kind is Kind.CHAIN]
        best = max(chains, key=lambda one: median(_rates(one)), default=None)
        for one in runs:
            wrong = chain_is_wrong and one in chains and case.temperature > 0
            declined = one.method.kind is Kind.SEQUOIA and one.drafts == 0
            note = CHAIN_SAMPLES_WRONGLY if wrong else DECLINED if declined else None
            summed.append(_result(case, one, runs[0], note, one is best))
    return summed


def _rates(runs: MethodRuns) -> list[float]:
    return [one.steady.tokens_per_second for one in runs.rounds]


def _result(
    case: EngineCase,
    runs: MethodRuns,
    plain: MethodRuns,
    note: str | None,
    best_chain: bool,
) -> Result:
    rates = _rates(runs)
    speedup = Spread.of([rate / base for rate, base in zip(rates, _rates(plain), strict=True)])
    steady = pooled([one.steady for one in runs.rounds])
    depth = 0 if runs.tree is None else runs.tree.trim(runs.drafts + 1).depth
    trees = sum(one.counters["tree_steps"] for one in runs.rounds if one.counters)
    drafted = trees / (steady.steps * case.batch_size)
    return Result(
        method=runs.method.name,
        kind=runs.method.kind,
        batch_size=case.batch_size,
        temperature=case.temperature,
        drafts=runs.drafts,
        depth=runs.drafts if runs.method.kind is Kind.CHAIN else depth,
        tokens_per_second=Spread.of(rates),
        speedup=speedup,
        tokens_per_step=steady.tokens_per_step,
        step_seconds=steady.step_seconds,
        split=split(runs.rounds, steady.step_seconds),
        best_chain=best_chain,
        note=note,
        drafted=drafted if runs.method.kind is Kind.SEQUOIA else None,
    )


def split(rounds: Sequence[RoundRun], step_seconds: float) -> StepSplit:
    """Mean time of each part of a step that takes ``step_seconds``."""
    steps = max(1, sum(one.parts["steps"] for one in rounds))
    parts = {part: sum(one.parts[part] for one in rounds) / steps for part in PARTS}
    return StepSplit(**parts, other=step_seconds - sum(parts.values()))


def synthetic_note(model: BenchModel) -> str | None:
    """Note beside figures of a synthetic target; None: an ordinary model."""
    if (origin := model.grown_from) is None:
        return None
    return (
        f"{model.name} is a synthetic target made from {origin.get('from')}: "
        f"{origin.get('layers')} layers, MLP width {origin.get('intermediate_size')}. It computes "
        "what the small model does: speeds are those of a larger model whose draft is accepted as "
        "often as the small pair's."
    )


def chain_samples_wrongly() -> bool:
    """Whether vllm-project/vllm#55005 applies: a CPU build without Triton."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return bool(current_platform.is_cpu() and not HAS_TRITON)
