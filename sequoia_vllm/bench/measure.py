"""Runs the comparison: every method on the same prompts, in alternating rounds.

Greedy outputs are compared with plain vLLM's. In float32 every difference is an error. In half
precision, batches of another shape round sums differently, so either of two tokens with nearly
equal logits may win. The target then scores the whole output again. From the difference on, every
token must be within `NEAR_TIE` of the target's best one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from sequoia_vllm.bench.engines import BenchEngine, open_engines
from sequoia_vllm.bench.methods import Method
from sequoia_vllm.bench.report import GreedyCheck, Mismatch
from sequoia_vllm.bench.rounds import BenchSettings, EngineCase, RoundRun, run_round, warm_up
from sequoia_vllm.measuring.engines import EngineSpec, Progress
from sequoia_vllm.tree.token_tree import TokenTree

Opener = Callable[
    [Sequence[Method], EngineSpec, dict[str, Any], Progress],
    AbstractContextManager[dict[str, BenchEngine]],
]
"""Starts engines, like `engines.open_engines`."""
Watch = Callable[[Method, EngineCase, RoundRun], None]
"""Called with each round as soon as it was measured."""
# Log-probability gap (nats) that rounding may reverse: two units in the last place of a logit
# between 16 and 32, in this dtype.
NEAR_TIE = {"bfloat16": 0.25, "float16": 0.03125}


@dataclass(frozen=True)
class MethodRuns:
    """Runs of one method in one case."""

    method: Method
    tree: TokenTree | None  # Sequoia's tree; None: another method, or "auto" does not speculate
    drafts: int  # drafts of each request at this batch size
    rounds: list[RoundRun]


@dataclass
class BenchRuns:
    """Everything that was measured."""

    dtype: str
    runs: dict[EngineCase, list[MethodRuns]] = field(default_factory=dict)
    """Runs by case, in the order of the settings' methods."""
    greedy: GreedyCheck | None = None
    """Greedy outputs compared with plain vLLM's; None: there were none."""


def measure(
    settings: BenchSettings,
    progress: Progress | None = None,
    opener: Opener | None = None,
    watch: Watch | None = None,
) -> BenchRuns:
    """Measures every method in every case; ``opener`` starts the engines, None: `open_engines`.
    Raises BenchError or CalibrationError if engines cannot start, or nothing is left to measure."""
    report = progress or (lambda what, done, total: None)
    start = opener or open_engines
    options = settings.engine_options()
    with start(settings.methods, settings.engine, options, report) as engines:
        plain = engines[settings.methods[0].name]
        found = BenchRuns(plain.dtype)
        methods = {case: settings.methods_in(case) for case in settings.cases}
        # Turns of all cases are counted together, so that progress never jumps back.
        total, ended = settings.rounds * sum(map(len, methods.values())), 0
        for case in settings.cases:
            where = f"T={case.temperature:g}, batch {case.batch_size}: "

            def say(what: str, done: int, before: int = ended, where: str = where) -> None:
                report(where + what, before + done, total)

            found.runs[case] = _measure_case(settings, case, methods[case], engines, say, watch)
            ended += settings.rounds * len(methods[case])
            if case.temperature == 0:
                _check_outputs(settings, case, found, plain)
    return found


def _measure_case(
    settings: BenchSettings,
    case: EngineCase,
    methods: Sequence[Method],
    engines: Mapping[str, BenchEngine],
    say: Callable[[str, int], None],
    watch: Watch | None,
) -> list[MethodRuns]:
    runs: dict[str, MethodRuns] = {}
    for method in methods:
        say(f"warming up {method.name}", 0)
        engine = engines[method.name]
        warm_up(engine, settings.prompts, case, settings.max_tokens)
        runs[method.name] = MethodRuns(method, engine.tree, engine.drafts(case.batch_size), [])
    for number in range(settings.rounds):
        first = number % len(methods)  # each in turn, so that none is always first or last
        for place, method in enumerate([*methods[first:], *methods[:first]]):
            say(f"round {number + 1}, {method.name}", number * len(methods) + place)
            one = run_round(engines[method.name], settings.prompts, case, settings.max_tokens)
            runs[method.name].rounds.append(one)
            if watch is not None:
                watch(method, case, one)
    return list(runs.values())


def _check_outputs(
    settings: BenchSettings, case: EngineCase, found: BenchRuns, plain: BenchEngine
) -> None:
    """Compares every greedy output of this case with plain vLLM's from the first round."""
    bound = NEAR_TIE.get(found.dtype)
    check = found.greedy or GreedyCheck(compared=0, identical=0, bound=bound)
    expected = found.runs[case][0].rounds[0].token_ids
    compared, identical = check.compared, check.identical
    mismatches: dict[tuple[str, int, int, int | None], Mismatch] = {}
    for runs in found.runs[case]:
        for prompt, output in (pair for one in runs.rounds for pair in enumerate(one.token_ids)):
            compared += 1
            if output == expected[prompt]:
                identical += 1
                continue
            pairs = [*zip_longest(output, expected[prompt])]
            position = next(place for place, (got, wanted) in enumerate(pairs) if got != wanted)
            token, plain_token = pairs[position]
            key = runs.method.name, prompt, position, token
            if key in mismatches:
                continue
            gaps = plain.gaps_to_best(settings.prompts[prompt], output)[position:]
            gap = max(gaps, default=0.0)
            ended = token is None or plain_token is None
            mismatches[key] = Mismatch(
                method=runs.method.name,
                batch_size=case.batch_size,
                prompt=prompt,
                position=position,
                token=token,
                plain_token=plain_token,
                gap=round(gap, 6),
                near_tie=not ended and bound is not None and gap <= bound,
            )
    found.greedy = GreedyCheck(
        compared=compared, identical=identical, bound=bound,
        mismatches=[*check.mismatches, *mismatches.values()],
    )  # fmt: skip
