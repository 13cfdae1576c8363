"""Runs the comparison: every method on the same prompts, in alternating rounds.

Greedy outputs are compared with plain vLLM's. In float32 every difference is an error. In half
precision, batches of another shape round sums differently, so either of two tokens with nearly
equal logits may win. The target then scores the whole output again. From the difference on, every
token must be within `NEAR_TIE` of the target's best one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from sequoia_vllm.bench.chains import ChainSearch, search_chains
from sequoia_vllm.bench.engines import BenchEngine, check_memory, most_engines, open_engines
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
# The most chains that a search chooses: each needs an engine beside all others.
_MOST_CHAINS = 6


@dataclass(frozen=True)
class MethodRuns:
    """Runs of one method in one case.

    Attributes:
        tree: Sequoia's tree; None: another method, or "auto" does not speculate.
        drafts: Drafts of each request at this batch size.
    """

    method: Method
    tree: TokenTree | None
    drafts: int
    rounds: list[RoundRun]


@dataclass
class BenchRuns:
    """Everything that was measured.

    Attributes:
        runs: Runs by case, in the order of the settings' methods; chains from the search come
            after plain vLLM.
        greedy: Greedy outputs compared with plain vLLM's; None: there were none.
    """

    dtype: str
    runs: dict[EngineCase, list[MethodRuns]] = field(default_factory=dict)
    search: ChainSearch | None = None
    greedy: GreedyCheck | None = None


@dataclass
class Turns:
    """Counts the turns of all cases together, so that progress never jumps back at a new case."""

    progress: Progress
    total: int
    done: int = 0

    def report(self, what: str) -> None:
        """Reports what begins; warming up is not a turn of its own."""
        self.progress(what, self.done, self.total)


def measure(
    settings: BenchSettings,
    progress: Progress | None = None,
    opener: Opener | None = None,
    watch: Watch | None = None,
) -> BenchRuns:
    """Measures every method in every case; ``opener`` starts the engines, None: `open_engines`.

    Raises:
        BenchError, CalibrationError: If engines cannot start, or the settings leave nothing to
            measure.
    """
    report = progress or (lambda what, done, total: None)

    def opened(methods: Sequence[Method]) -> AbstractContextManager[dict[str, BenchEngine]]:
        start = opener or open_engines
        return start(methods, settings.engine, settings.engine_options(), report)

    @contextmanager
    def one_opened(method: Method) -> Iterator[BenchEngine]:
        with opened([method]) as engines:
            yield engines[method.name]

    with ExitStack() as stack:
        room = _room_for_chains(settings)
        engines = stack.enter_context(opened(settings.methods))
        plain = engines[settings.methods[0].name]
        found = BenchRuns(plain.dtype)
        if settings.search_chains:
            found.search = search_chains(settings, plain, room, one_opened, report)
            chains = found.search.methods(settings.engine.draft)
            engines |= stack.enter_context(opened(chains))
        chosen, draft = found.search, settings.engine.draft
        methods = {
            case: settings.methods_in(case, chosen.methods(draft, case) if chosen else ())
            for case in settings.cases
        }
        turns = Turns(report, settings.rounds * sum(map(len, methods.values())))
        for case in settings.cases:
            found.runs[case] = _measure_case(settings, case, methods[case], engines, turns, watch)
            if case.temperature == 0:
                _check_outputs(settings, case, found, plain)
    return found


def _room_for_chains(settings: BenchSettings) -> int:
    """How many chains the search may choose.

    Raises:
        BenchError: If memory is too small for one more engine.
    """
    if not settings.search_chains:
        return 0
    check_memory(settings.engine, len(settings.methods) + 1)
    room = most_engines(settings.engine)
    return _MOST_CHAINS if room is None else min(_MOST_CHAINS, room - len(settings.methods))


def rotated(methods: Sequence[Method], turn: int) -> list[Method]:
    """Rotates the methods by one each turn, so that none is always first or last."""
    start = turn % len(methods)
    return [*methods[start:], *methods[:start]]


def _measure_case(
    settings: BenchSettings,
    case: EngineCase,
    methods: Sequence[Method],
    engines: Mapping[str, BenchEngine],
    turns: Turns,
    watch: Watch | None,
) -> list[MethodRuns]:
    where = f"T={case.temperature:g}, batch {case.batch_size}"
    runs: dict[str, MethodRuns] = {}
    for method in methods:
        turns.report(f"{where}: warming up {method.name}")
        engine = engines[method.name]
        warm_up(engine, settings.prompts, case, settings.max_tokens)
        runs[method.name] = MethodRuns(method, engine.tree, engine.drafts(case.batch_size), [])
    for number in range(settings.rounds):
        for method in rotated(methods, number):
            turns.report(f"{where}: round {number + 1}, {method.name}")
            one = run_round(engines[method.name], settings.prompts, case, settings.max_tokens)
            runs[method.name].rounds.append(one)
            turns.done += 1
            if watch is not None:
                watch(method, case, one)
    return list(runs.values())


def _check_outputs(
    settings: BenchSettings, case: EngineCase, found: BenchRuns, plain: BenchEngine
) -> None:
    """Compares every greedy output of this case with plain vLLM's from the first round."""
    check = found.greedy or GreedyCheck(compared=0, identical=0, bound=NEAR_TIE.get(found.dtype))
    expected = found.runs[case][0].rounds[0].token_ids
    compared, identical = check.compared, check.identical
    mismatches: dict[tuple[str, int, int, int | None], Mismatch] = {}
    for runs in found.runs[case]:
        outputs = [pair for one in runs.rounds for pair in enumerate(one.token_ids)]
        compared += len(outputs)
        for prompt, output in outputs:
            position = first_difference(output, expected[prompt])
            if position is None:
                identical += 1
                continue
            token, plain_token = _token(output, position), _token(expected[prompt], position)
            key = runs.method.name, prompt, position, token
            if key in mismatches:
                continue
            gaps = plain.gaps_to_best(settings.prompts[prompt], output)[position:]
            ended = token is None or plain_token is None
            mismatches[key] = Mismatch(
                method=runs.method.name,
                batch_size=case.batch_size,
                prompt=prompt,
                position=position,
                token=token,
                plain_token=plain_token,
                gap=round(max(gaps, default=0.0), 6),
                near_tie=not ended and is_near_tie(gaps, found.dtype),
            )
    found.greedy = GreedyCheck(
        compared=compared, identical=identical, bound=check.bound,
        mismatches=[*check.mismatches, *mismatches.values()],
    )  # fmt: skip


def first_difference(found: Sequence[int], plain: Sequence[int]) -> int | None:
    """Position of the first difference between two outputs; None: they are equal."""
    for position in range(max(len(found), len(plain))):
        if _token(found, position) != _token(plain, position):
            return position
    return None


def _token(output: Sequence[int], position: int) -> int | None:
    return output[position] if position < len(output) else None


def is_near_tie(gaps: Sequence[float], dtype: str) -> bool:
    """Whether rounding explains a difference between two outputs.

    Args:
        gaps: Log-probability gap (nats) between the target's best token and each token of the
            method's output, from the difference on.
        dtype: Type of weights and activations.
    """
    return dtype in NEAR_TIE and max(gaps) <= NEAR_TIE[dtype]
