"""Settings of a comparison, and one round: all prompts through one engine, once."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import cycle, islice
from typing import Any

from sequoia_vllm.bench.engines import Arrival, BenchEngine
from sequoia_vllm.bench.methods import BenchError, Kind, Method
from sequoia_vllm.measuring.engines import EngineSpec, room_for, wait_for_quiet
from sequoia_vllm.measuring.step_recorder import EXTENSION

_WARM_UP_TOKENS = 16


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
    def most_drafts(self) -> int:
        """The most drafts per request and step, over all methods."""
        return max(method.most_drafts for method in self.methods)

    @property
    def cases(self) -> list[EngineCase]:
        """Every temperature with every batch size."""
        return [EngineCase(b, t) for t in self.temperatures for b in self.batch_sizes]

    def engine_options(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` that give every engine room for every method."""
        most = self.most_drafts
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
    """The steps after every request has its first token, up to the first completion, or BenchError.
    The completing step counts with all its tokens, as steps with many tokens are the likeliest to
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


def warm_up(
    engine: BenchEngine, prompts: Sequence[list[int]], case: EngineCase, max_tokens: int
) -> None:
    """Runs a short batch of the same kind before measuring an engine in a case."""
    batch = batches(prompts, case.batch_size)[0]
    engine.generate(batch, case.temperature, min(_WARM_UP_TOKENS, max_tokens))


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
