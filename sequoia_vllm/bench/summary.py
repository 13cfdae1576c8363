"""From measurements to the results of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from sequoia_vllm.bench.chain_probe import ChainSearch
from sequoia_vllm.bench.decode_rate import pooled
from sequoia_vllm.bench.measure import Measurements, MethodRuns
from sequoia_vllm.bench.methods import AUTO, Kind, chain
from sequoia_vllm.bench.parts import PARTS
from sequoia_vllm.bench.report import Prediction, Result, SearchedChain, Spread, StepSplit
from sequoia_vllm.bench.rounds import Case, RoundRun

Predict = Callable[[MethodRuns, Case], Prediction | None]
CHAIN_SAMPLES_WRONGLY = (
    "vLLM's chain samples wrongly at temperatures above 0 on CPUs without Triton "
    "(vllm-project/vllm#55005): its tokens are not the target's, and it accepts fewer drafts than "
    "it should, so that its speed there says nothing of vLLM's chain elsewhere"
)
DECLINED = '"auto" does not speculate here'


def results(found: Measurements, predict: Predict, *, chain_is_wrong: bool) -> list[Result]:
    """One result for each method and case.

    Args:
        found: What was measured.
        predict: What the cost model says of a method in a case.
        chain_is_wrong: Whether this machine's vLLM has bug #55005.
    """
    summed = []
    for case, runs in found.runs.items():
        of_case = [
            _result(case, one, runs[0], predict(one, case), _note(case, one, chain_is_wrong))
            for one in runs
        ]
        summed += _with_best_chain(of_case)
    return summed


def _with_best_chain(of_case: list[Result]) -> list[Result]:
    chains = [result for result in of_case if result.kind is Kind.CHAIN]
    best = max(chains, key=lambda result: result.tokens_per_second.median, default=None)
    return [
        result.model_copy(update={"best_chain": True}) if result is best else result
        for result in of_case
    ]


def _result(
    case: Case, runs: MethodRuns, plain: MethodRuns, predicted: Prediction | None, note: str | None
) -> Result:
    rates = [one.steady.tokens_per_second for one in runs.rounds]
    plain_rates = [one.steady.tokens_per_second for one in plain.rounds]
    speedup = spread([rate / base for rate, base in zip(rates, plain_rates, strict=True)])
    steady = pooled([one.steady for one in runs.rounds])
    return Result(
        method=runs.method.name,
        kind=runs.method.kind,
        batch_size=case.batch_size,
        temperature=case.temperature,
        drafts=runs.drafts,
        depth=_depth(runs),
        tokens_per_second=spread(rates),
        speedup=speedup,
        tokens_per_step=steady.tokens_per_step,
        step_seconds=steady.step_seconds,
        split=split(runs.rounds, steady.step_seconds),
        request_seconds=spread([one.request_seconds for one in runs.rounds]),
        engine_parts=engine_parts([one.counters for one in runs.rounds if one.counters]),
        predicted=predicted,
        measured_over_predicted=speedup.median / predicted.speedup if predicted else None,
        note=note,
    )


def searched(search: ChainSearch, draft: str) -> list[SearchedChain]:
    """What was predicted of every chain in every case."""
    return [
        SearchedChain(
            method=chain(draft, one.chain.drafts, one.chain.sampling).name,
            batch_size=case.batch_size,
            temperature=case.temperature,
            drafts=one.chain.drafts,
            sampling=one.chain.sampling.words,
            tokens_per_step=round(one.tokens_per_step, 4),
            tokens_per_second=round(one.tokens_per_second, 4),
            run=one.chain in search.chosen[case],
        )
        for case, predicted in search.predicted.items()
        for one in predicted
    ]


def spread(values: Sequence[float]) -> Spread:
    """Median and range."""
    return Spread(median=median(values), low=min(values), high=max(values))


def split(rounds: Sequence[RoundRun], step_seconds: float) -> StepSplit:
    """Mean time of each part of a step, of a step that takes ``step_seconds``."""
    steps = max(1, sum(one.parts["steps"] for one in rounds))
    parts = {part: sum(one.parts[part] for one in rounds) / steps for part in PARTS}
    return StepSplit(**parts, other=step_seconds - sum(parts.values()))


def engine_parts(counters: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Seconds per step of each part that Sequoia's runner times itself."""
    steps = sum(one["steps"] for one in counters)
    if steps == 0:
        return None
    names = counters[0]["seconds"]
    return {name: sum(one["seconds"][name] for one in counters) / steps for name in names}


def _depth(runs: MethodRuns) -> int:
    if runs.method.kind is Kind.CHAIN:
        return runs.drafts
    return 0 if runs.tree is None else runs.tree.trim(runs.drafts + 1).depth


def _note(case: Case, runs: MethodRuns, chain_is_wrong: bool) -> str | None:
    if runs.method.kind is Kind.CHAIN and case.temperature > 0 and chain_is_wrong:
        return CHAIN_SAMPLES_WRONGLY
    config = runs.method.speculative_config or {}
    if config.get("tree") == AUTO and runs.drafts == 0:
        return DECLINED
    return None
