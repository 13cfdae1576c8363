"""Runs the comparison: every method on the same prompts, in alternating rounds.

Greedy outputs are compared with plain vLLM's. In float32 every difference is an error. In half
precision, batches of another shape round sums differently, so either of two tokens with nearly
equal logits may win. The target then scores the whole output again. From the difference on, every
token must be within `NEAR_TIE` of the target's best one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from itertools import cycle, islice, zip_longest
from typing import Any

from pydantic import Field

from sequoia_vllm.bench.engines import Arrival, BenchEngine, open_engines
from sequoia_vllm.bench.methods import BenchError, Kind, Method
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.measuring.engines import EngineSpec, Progress, room_for, wait_for_quiet
from sequoia_vllm.measuring.step_recorder import EXTENSION
from sequoia_vllm.tree import TokenTree

_WARM_UP_TOKENS = 16
Opener = Callable[
    [Sequence[Method], EngineSpec, dict[str, Any], Progress],
    AbstractContextManager[dict[str, BenchEngine]],
]  # starts engines, like `engines.open_engines`
Watch = Callable[[Method, "EngineCase", "RoundRun"], None]
"""Called with each round as soon as it was measured."""
# Log-probability gap (nats) that rounding may reverse: two units in the last place of a logit
# between 16 and 32, in this dtype.
NEAR_TIE = {"bfloat16": 0.25, "float16": 0.03125}


class Mismatch(FileModel):
    """A greedy output that differs from plain vLLM's."""

    method: str
    batch_size: int = Field(ge=1)
    prompt: int = Field(ge=0, description="Number of the prompt, from 0.")
    position: int = Field(ge=0, description="Output tokens that agree before it.")
    token: int | None = Field(default=None, description="The method's; none: it ended there.")
    plain_token: int | None = Field(default=None, description="Plain vLLM's; none: it ended there.")
    gap: float | None = None  # largest from the difference on, nats below the best token
    near_tie: bool = Field(description="Whether rounding explains it: no error.")


class GreedyCheck(FileModel):
    """All greedy outputs compared with plain vLLM's."""

    compared: int = Field(ge=0, description="Outputs compared.")
    identical: int = Field(ge=0)
    bound: float | None = None  # largest gap of a near-tie, nats; none: every mismatch is wrong
    mismatches: list[Mismatch] = Field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether rounding explains every mismatch; true without any."""
        return all(mismatch.near_tie for mismatch in self.mismatches)


@dataclass(frozen=True)
class EngineCase:
    """The number of requests at once, and their temperature."""

    batch_size: int
    temperature: float


@dataclass(frozen=True)
class BenchSettings:
    """What to compare, and how."""

    engine: EngineSpec
    _: KW_ONLY
    methods: tuple[Method, ...]  # methods to compare; the first is plain vLLM
    prompts: tuple[list[int], ...]  # token ids; every round completes all of them
    batch_sizes: tuple[int, ...] = (1,)  # requests at once; prompts are repeated to fill a batch
    temperatures: tuple[float, ...] = (0.0,)  # temperatures to measure at; 0 is greedy
    max_tokens: int = 64
    rounds: int = 3
    sampled_chains: bool = True  # run vLLM's chains above temperature 0, too

    def methods_in(self, case: EngineCase) -> list[Method]:
        """The methods to run in a case."""
        chains = case.temperature == 0 or self.sampled_chains
        return [one for one in self.methods if chains or one.kind is not Kind.CHAIN]

    @property
    def cases(self) -> list[EngineCase]:
        """Every temperature with every batch size."""
        return [EngineCase(b, t) for t in self.temperatures for b in self.batch_sizes]

    def engine_options(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` that give every engine room for every method."""
        most = max(method.most_drafts for method in self.methods)
        # Completions may overshoot by a step's drafts, and need room for a whole tree then.
        longest = max(map(len, self.prompts)) + self.max_tokens + 1 + 2 * most
        return {
            **room_for(longest, max(self.batch_sizes), most + 1),
            # Rounds must be alike: each reads its prompts anew, in the same chunks.
            "enable_prefix_caching": False,
            "worker_extension_cls": EXTENSION,
            "disable_log_stats": False,
        }


@dataclass(frozen=True)
class Steady:
    """Steps in which every request of the batch was decoding."""

    step_tokens: list[int]  # tokens of each request in each step that gave it any
    steps: int
    seconds: float
    batch_size: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole batch per second."""
        return sum(self.step_tokens) / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Tokens per request and step."""
        return sum(self.step_tokens) / self.steps / self.batch_size

    @property
    def step_seconds(self) -> float:
        """Mean time of a step."""
        return self.seconds / self.steps


def steady_part(arrivals: Sequence[Arrival]) -> Steady:
    """The steps from every request's first token to the first completion; there must be some.
    The completing step counts with all its tokens: steps with many tokens are the likeliest to
    complete a request."""
    received = [0] * len(arrivals[0].tokens) if arrivals else []
    start = None
    inside: list[Arrival] = []
    for arrival in arrivals:
        if start is not None:
            inside.append(arrival)
        if arrival.finished:
            break
        received = [a + b for a, b in zip(received, arrival.tokens, strict=True)]
        if start is None and min(received) > 0:
            start = arrival.seconds
    step_tokens = [tokens for arrival in inside for tokens in arrival.tokens if tokens]
    # Steps without tokens (preempted requests) still count in time.
    if start is None or not step_tokens:
        raise BenchError(
            "no step had all requests decoding: completions are too short (--max-tokens), or the "
            "KV cache is too small for the batch (--kv-cache-gib)"
        )
    return Steady(step_tokens, len(inside), inside[-1].seconds - start, len(received))


def pooled(parts: Sequence[Steady]) -> Steady:
    """Joins the steady parts of several batches."""
    return Steady(
        step_tokens=[tokens for part in parts for tokens in part.step_tokens],
        steps=sum(part.steps for part in parts),
        seconds=sum(part.seconds for part in parts),
        batch_size=parts[0].batch_size,
    )


@dataclass(frozen=True)
class RoundRun:
    """Measurements of all prompts through one engine, once."""

    steady: Steady  # steps in which whole batches decode
    token_ids: list[list[int]]
    texts: list[str]
    parts: dict[str, float]  # `part_seconds`
    counters: dict[str, Any] | None  # Sequoia's (`StepStats.to_dict`); None: another method


def batches(prompts: Sequence[list[int]], batch_size: int) -> list[list[list[int]]]:
    """Splits prompts into full batches; the first ones are repeated to fill the last."""
    count = -(-len(prompts) // batch_size)
    endless = cycle(prompts)
    return [list(islice(endless, batch_size)) for _ in range(count)]


def run_round(
    engine: BenchEngine, prompts: Sequence[list[int]], case: EngineCase, max_tokens: int
) -> RoundRun:
    """Completes all prompts with ``max_tokens`` tokens each."""
    engine.take_part_seconds(case.batch_size)  # drops earlier steps
    engine.take_counters()
    wait_for_quiet()
    found = [
        engine.generate(batch, case.temperature, max_tokens)
        for batch in batches(prompts, case.batch_size)
    ]
    count = len(prompts)
    return RoundRun(
        steady=pooled([steady_part(one.arrivals) for one in found]),
        token_ids=[ids for one in found for ids in one.token_ids][:count],
        texts=[text for one in found for text in one.texts][:count],
        parts=engine.take_part_seconds(case.batch_size),
        counters=engine.take_counters(),
    )


@dataclass(frozen=True)
class MethodRuns:
    """Runs of one method in one case."""

    method: Method
    tree: TokenTree | None  # Sequoia's tree; None: another method, or "auto" does not speculate
    drafts: int  # drafts of each request at this batch size
    rounds: list[RoundRun]


@dataclass(frozen=True)
class BenchRuns:
    """Everything that was measured."""

    dtype: str
    runs: dict[EngineCase, list[MethodRuns]]  # by case, in the order of the settings' methods
    greedy: GreedyCheck | None = None  # of all greedy outputs; None: there were none


def measure(
    settings: BenchSettings,
    progress: Progress | None = None,
    opener: Opener | None = None,
    watch: Watch | None = None,
) -> BenchRuns:
    """Measures every method in every case.

    Args:
        opener: Starts the engines; None: `open_engines`.

    Raises:
        BenchError, CalibrationError: Engines cannot start, or nothing is left to measure.
    """
    report = progress or (lambda what, done, total: None)
    start = opener or open_engines
    cases = {case: settings.methods_in(case) for case in settings.cases}
    # Turns of all cases are counted together, so that progress never jumps back.
    total, ended = settings.rounds * sum(map(len, cases.values())), 0
    found: dict[EngineCase, list[MethodRuns]] = {}
    with start(settings.methods, settings.engine, settings.engine_options(), report) as engines:
        for case, methods in cases.items():
            where = f"T={case.temperature:g}, batch {case.batch_size}: "
            runs: dict[str, MethodRuns] = {}
            batch = batches(settings.prompts, case.batch_size)[0]
            for method in methods:
                report(f"{where}warming up {method.name}", ended, total)
                engine, drafts = engines[method.name], engines[method.name].drafts(case.batch_size)
                tokens = min(_WARM_UP_TOKENS, settings.max_tokens)
                engine.generate(batch, case.temperature, tokens)
                runs[method.name] = MethodRuns(method, engine.tree, drafts, [])
            for number in range(settings.rounds):
                first = number % len(methods)  # each in turn: none is always first or last
                for method in [*methods[first:], *methods[:first]]:
                    report(f"{where}round {number + 1}, {method.name}", ended, total)
                    engine = engines[method.name]
                    one = run_round(engine, settings.prompts, case, settings.max_tokens)
                    runs[method.name].rounds.append(one)
                    ended += 1
                    if watch is not None:
                        watch(method, case, one)
            found[case] = list(runs.values())
        plain = engines[settings.methods[0].name]
        return BenchRuns(plain.dtype, found, check_outputs(settings, found, plain))


def check_outputs(
    settings: BenchSettings, runs: Mapping[EngineCase, list[MethodRuns]], plain: BenchEngine
) -> GreedyCheck | None:
    """Compares every greedy output with plain vLLM's from the first round; None: there are none."""
    bound = NEAR_TIE.get(plain.dtype)
    outputs = [
        (case, of_method.method.name, prompt, output, of_case[0].rounds[0].token_ids[prompt])
        for case, of_case in runs.items()
        if case.temperature == 0
        for of_method in of_case
        for one in of_method.rounds
        for prompt, output in enumerate(one.token_ids)
    ]
    mismatches: dict[tuple[EngineCase, str, int, int, int | None], Mismatch] = {}
    for case, method, prompt, output, expected in outputs:
        if output == expected:
            continue
        pairs = [*zip_longest(output, expected)]
        position = next(place for place, (got, wanted) in enumerate(pairs) if got != wanted)
        token, plain_token = pairs[position]
        if (key := (case, method, prompt, position, token)) in mismatches:
            continue
        gap = max(plain.gaps_to_best(settings.prompts[prompt], output)[position:], default=0.0)
        ended = token is None or plain_token is None
        mismatches[key] = Mismatch(
            method=method,
            batch_size=case.batch_size,
            prompt=prompt,
            position=position,
            token=token,
            plain_token=plain_token,
            gap=round(gap, 6),
            near_tie=not ended and bound is not None and gap <= bound,
        )
    identical = sum(output == expected for *_, output, expected in outputs)
    check = GreedyCheck(
        compared=len(outputs), identical=identical, bound=bound, mismatches=[*mismatches.values()]
    )
    return check if outputs else None
