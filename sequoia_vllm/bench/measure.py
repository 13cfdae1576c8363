"""Runs the comparison: every method on the same prompts, in alternating rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field

from sequoia_vllm.bench.chain_probe import ChainProbe, ChainSearch
from sequoia_vllm.bench.chain_search import MOST_DRAFTS
from sequoia_vllm.bench.engines import (
    BenchEngine,
    Limits,
    check_memory,
    most_engines,
    open_engines,
)
from sequoia_vllm.bench.methods import Method
from sequoia_vllm.bench.outputs import NEAR_TIE, Difference, first_difference, is_near_tie
from sequoia_vllm.bench.report import GreedyCheck, Mismatch
from sequoia_vllm.bench.rounds import Case, RoundRun, run_round, warm_up
from sequoia_vllm.measuring.engines import EngineSpec, Progress
from sequoia_vllm.tree.token_tree import TokenTree

# Chains that a search chooses at most: each is an engine, alive with all others.
_MOST_CHAINS = 6


@dataclass(frozen=True)
class BenchSettings:
    """What is compared, and how.

    Attributes:
        engine: Models, and how all engines run them.
        methods: The first is plain vLLM.
        search_chains: Look for vLLM's best chain in each case, and run it with the methods.
        prompts: Token ids; every round completes all of them.
        batch_sizes: Requests at once; prompts are repeated to fill a batch.
        temperatures: Of every request; 0 is greedy.
        max_tokens: Tokens of every completion.
        rounds: Times everything is measured.
    """

    engine: EngineSpec
    _: KW_ONLY
    methods: tuple[Method, ...]
    search_chains: bool = False
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
            most_drafts=max(
                MOST_DRAFTS if self.search_chains else 0,
                *(method.most_drafts for method in self.methods),
            ),
        )

    @property
    def cases(self) -> list[Case]:
        """Every temperature with every batch size."""
        return [Case(b, t) for t in self.temperatures for b in self.batch_sizes]


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
        runs: By case, in the order of the settings' methods; chains that were
            searched for come after plain vLLM.
        search: What the search for chains found; None: there was none.
        greedy: Greedy outputs against plain vLLM's; None: there were none.
    """

    dtype: str
    runs: dict[Case, list[MethodRuns]] = field(default_factory=dict)
    search: ChainSearch | None = None
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
    with ExitStack() as stack:
        room = _room_for_chains(settings)
        engines = stack.enter_context(_opened(settings, settings.methods, report))
        plain = engines[settings.methods[0].name]
        found = Measurements(plain.dtype)
        if settings.search_chains:
            found.search = _probe(settings, report).search(plain, room)
            chains = found.search.methods(settings.engine.draft)
            engines |= stack.enter_context(_opened(settings, chains, report))
        for case in settings.cases:
            methods = _methods_of(settings, found.search, case)
            found.runs[case] = _measure_case(settings, case, methods, engines, report)
            if case.temperature == 0:
                check = _check_outputs(settings, case, found, plain)
                found.greedy = check if found.greedy is None else _joined(found.greedy, check)
    return found


def _room_for_chains(settings: BenchSettings) -> int:
    """How many chains may be searched for.

    Raises:
        BenchError: If there is no memory for one beside the other engines.
    """
    if not settings.search_chains:
        return 0
    check_memory(settings.engine, len(settings.methods) + 1)
    room = most_engines(settings.engine)
    return _MOST_CHAINS if room is None else min(_MOST_CHAINS, room - len(settings.methods))


@contextmanager
def _opened(
    settings: BenchSettings, methods: Sequence[Method], report: Progress
) -> Iterator[dict[str, BenchEngine]]:
    with open_engines(methods, settings.engine, settings.limits(), report) as engines:
        yield engines


def _probe(settings: BenchSettings, report: Progress) -> ChainProbe:
    @contextmanager
    def open_engine(method: Method) -> Iterator[BenchEngine]:
        with _opened(settings, [method], report) as engines:
            yield engines[method.name]

    return ChainProbe(
        settings.engine.draft, settings.cases, settings.prompts, settings.max_tokens, open_engine,
        report,
    )  # fmt: skip


def _methods_of(settings: BenchSettings, search: ChainSearch | None, case: Case) -> list[Method]:
    plain, *others = settings.methods
    chains = [] if search is None else search.methods(settings.engine.draft, case)
    return [plain, *chains, *others]


def rotated(methods: Sequence[Method], turn: int) -> list[Method]:
    """The methods in another order each turn, so that none is always the first or the last."""
    start = turn % len(methods)
    return [*methods[start:], *methods[:start]]


def _measure_case(
    settings: BenchSettings,
    case: Case,
    methods: Sequence[Method],
    engines: Mapping[str, BenchEngine],
    report: Progress,
) -> list[MethodRuns]:
    where = f"T={case.temperature:g}, batch {case.batch_size}"
    for number, method in enumerate(methods):
        report(f"{where}: warming up {method.name}", number, len(methods))
        warm_up(engines[method.name], settings.prompts, case, settings.max_tokens)
    runs: dict[str, list[RoundRun]] = {method.name: [] for method in methods}
    for number in range(settings.rounds):
        for turn, method in enumerate(rotated(methods, number)):
            report(
                f"{where}: round {number + 1}, {method.name}",
                number * len(methods) + turn,
                settings.rounds * len(methods),
            )
            one = run_round(engines[method.name], settings.prompts, case, settings.max_tokens)
            runs[method.name].append(one)
    return [
        MethodRuns(
            method, engines[method.name].tree, engines[method.name].drafts(case.batch_size),
            runs[method.name],
        )
        for method in methods
    ]  # fmt: skip


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
