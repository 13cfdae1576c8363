"""Runs the comparison: every method on the same prompts, in alternating rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import cycle, islice
from typing import Any

from sequoia_vllm.bench.decode_rate import Steady, pooled, steady_part
from sequoia_vllm.bench.engines import BenchEngine, Limits, open_engines
from sequoia_vllm.bench.methods import Method
from sequoia_vllm.bench.outputs import NEAR_TIE, Difference, first_difference, is_near_tie
from sequoia_vllm.bench.report import GreedyCheck, Mismatch
from sequoia_vllm.measuring.engines import EngineSpec, Progress, wait_for_quiet
from sequoia_vllm.tree.token_tree import TokenTree

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class BenchSettings:
    """What is compared, and how.

    Attributes:
        engine: Models, and how all engines run them.
        methods: The first is plain vLLM.
        prompts: Token ids; every round completes all of them.
        batch_sizes: Requests at once; prompts are repeated to fill a batch.
        temperatures: Of every request; 0 is greedy.
        max_tokens: Tokens of every completion.
        rounds: Times everything is measured.
    """

    engine: EngineSpec
    _: KW_ONLY
    methods: tuple[Method, ...]
    prompts: tuple[list[int], ...]
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 64
    rounds: int = 3

    def limits(self) -> Limits:
        """What every engine must have room for."""
        return Limits(
            max_model_len=max(map(len, self.prompts)) + self.max_tokens + 1,
            max_num_seqs=max(self.batch_sizes),
        )


@dataclass(frozen=True)
class Case:
    """How the engines are used: requests at once, and their temperature."""

    batch_size: int
    temperature: float


@dataclass(frozen=True)
class RoundRun:
    """All prompts through one engine, once.

    Attributes:
        steady: The steps in which whole batches were decoding.
        request_seconds: Mean time of a batch from its start to its end.
        token_ids, texts: Completions, one for each prompt.
        parts: `part_seconds`.
        counters: Sequoia's (`StepStats.to_dict`); None: another method.
    """

    steady: Steady
    request_seconds: float
    token_ids: list[list[int]]
    texts: list[str]
    parts: dict[str, float]
    counters: dict[str, Any] | None


@dataclass(frozen=True)
class MethodRuns:
    """What one method did in one case.

    Attributes:
        method: The method.
        tree: Sequoia's tree; None: another method, or "auto" does not speculate.
        drafts: Of each request at this batch size.
        rounds: One entry a round.
    """

    method: Method
    tree: TokenTree | None
    drafts: int
    rounds: list[RoundRun]


@dataclass
class Measurements:
    """Everything that was measured.

    Attributes:
        dtype: Of weights and activations, as vLLM resolved it.
        runs: By case, in the order of the settings' methods.
        greedy: Greedy outputs against plain vLLM's; None: there were none.
    """

    dtype: str
    runs: dict[Case, list[MethodRuns]] = field(default_factory=dict)
    greedy: GreedyCheck | None = None


def measure(settings: BenchSettings, progress: Progress | None = None) -> Measurements:
    """Measures every method in every case.

    Args:
        settings: What to compare.
        progress: Called with (what is done, turns done, turns of this case).

    Raises:
        BenchError, CalibrationError: If engines cannot start, or settings give
            nothing to measure.
    """
    report = progress or (lambda what, done, total: None)
    with open_engines(settings.methods, settings.engine, settings.limits(), report) as engines:
        plain = engines[settings.methods[0].name]
        found = Measurements(plain.dtype)
        cases = [Case(b, t) for t in settings.temperatures for b in settings.batch_sizes]
        for case in cases:
            found.runs[case] = _measure_case(settings, case, engines, report)
            if case.temperature == 0:
                check = _check_outputs(settings, case, found, plain)
                found.greedy = check if found.greedy is None else _joined(found.greedy, check)
    return found


def batches(prompts: Sequence[list[int]], batch_size: int) -> list[list[list[int]]]:
    """All prompts, in full batches; the first ones are repeated to fill the last."""
    count = -(-len(prompts) // batch_size)
    endless = cycle(prompts)
    return [list(islice(endless, batch_size)) for _ in range(count)]


def rotated(methods: Sequence[Method], turn: int) -> list[Method]:
    """The methods in another order each turn, so that none is always the first or the last."""
    start = turn % len(methods)
    return [*methods[start:], *methods[:start]]


def _measure_case(
    settings: BenchSettings, case: Case, engines: dict[str, BenchEngine], report: Progress
) -> list[MethodRuns]:
    work = batches(settings.prompts, case.batch_size)
    where = f"T={case.temperature:g}, batch {case.batch_size}"
    for number, engine in enumerate(engines.values()):
        report(f"{where}: warming up {engine.method.name}", number, len(engines))
        engine.generate(work[0], case.temperature, min(_WARM_UP_TOKENS, settings.max_tokens))
    runs: dict[str, list[RoundRun]] = {method.name: [] for method in settings.methods}
    for number in range(settings.rounds):
        for turn, method in enumerate(rotated(settings.methods, number)):
            report(
                f"{where}: round {number + 1}, {method.name}",
                number * len(engines) + turn,
                settings.rounds * len(engines),
            )
            one = _run_round(engines[method.name], work, case, settings)
            runs[method.name].append(one)
    return [
        MethodRuns(
            method, engines[method.name].tree, engines[method.name].drafts(case.batch_size),
            runs[method.name],
        )
        for method in settings.methods
    ]  # fmt: skip


def _run_round(
    engine: BenchEngine, work: Sequence[list[list[int]]], case: Case, settings: BenchSettings
) -> RoundRun:
    engine.take_part_seconds(case.batch_size)  # forgets what was before
    engine.take_counters()
    wait_for_quiet()
    found = [engine.generate(batch, case.temperature, settings.max_tokens) for batch in work]
    count = len(settings.prompts)
    return RoundRun(
        steady=pooled([steady_part(one.arrivals) for one in found]),
        request_seconds=sum(one.seconds for one in found) / len(found),
        token_ids=[ids for one in found for ids in one.token_ids][:count],
        texts=[text for one in found for text in one.texts][:count],
        parts=engine.take_part_seconds(case.batch_size),
        counters=engine.take_counters(),
    )


def _check_outputs(
    settings: BenchSettings, case: Case, found: Measurements, plain: BenchEngine
) -> GreedyCheck:
    """Every greedy output of this case against plain vLLM's of the first round."""
    expected = found.runs[case][0].rounds[0].token_ids
    compared = 0
    mismatches: dict[tuple[str, Difference], Mismatch] = {}
    different = 0
    for runs in found.runs[case]:
        for one in runs.rounds:
            for prompt, output in enumerate(one.token_ids):
                compared += 1
                difference = first_difference(prompt, output, expected[prompt])
                if difference is None:
                    continue
                different += 1
                key = runs.method.name, difference
                if key not in mismatches:
                    gaps = plain.gaps_to_best(settings.prompts[prompt], output)
                    mismatches[key] = _mismatch(*key, case, gaps, found.dtype)
    return GreedyCheck(
        compared=compared,
        identical=compared - different,
        bound=NEAR_TIE.get(found.dtype),
        mismatches=list(mismatches.values()),
    )


def _mismatch(
    method: str, difference: Difference, case: Case, gaps: list[float], dtype: str
) -> Mismatch:
    return Mismatch(
        method=method,
        batch_size=case.batch_size,
        prompt=difference.prompt,
        position=difference.position,
        token=difference.token,
        plain_token=difference.plain_token,
        gap=round(max(gaps[difference.position :], default=0.0), 6),
        near_tie=is_near_tie(difference, gaps, dtype),
    )


def _joined(one: GreedyCheck, other: GreedyCheck) -> GreedyCheck:
    return GreedyCheck(
        compared=one.compared + other.compared,
        identical=one.identical + other.identical,
        bound=one.bound,
        mismatches=[*one.mismatches, *other.mismatches],
    )
