"""One round: all prompts through one engine, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from sequoia_vllm.bench.decode_rate import Steady, pooled, steady_part, tokens_of_steps
from sequoia_vllm.bench.engines import BenchEngine
from sequoia_vllm.measuring.engines import wait_for_quiet

_WARM_UP_TOKENS = 16


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
        step_tokens: What each request got in each of these steps.
        request_seconds: Mean time of a batch from its start to its end.
        token_ids, texts: Completions, one for each prompt.
        parts: `part_seconds`.
        counters: Sequoia's (`StepStats.to_dict`); None: another method.
    """

    steady: Steady
    step_tokens: list[int]
    request_seconds: float
    token_ids: list[list[int]]
    texts: list[str]
    parts: dict[str, float]
    counters: dict[str, Any] | None


def batches(prompts: Sequence[list[int]], batch_size: int) -> list[list[list[int]]]:
    """All prompts, in full batches; the first ones are repeated to fill the last."""
    count = -(-len(prompts) // batch_size)
    endless = cycle(prompts)
    return [list(islice(endless, batch_size)) for _ in range(count)]


def warm_up(engine: BenchEngine, prompts: Sequence[list[int]], case: Case, max_tokens: int) -> None:
    """A short batch of the same kind, before an engine is measured in a case."""
    batch = batches(prompts, case.batch_size)[0]
    engine.generate(batch, case.temperature, min(_WARM_UP_TOKENS, max_tokens))


def run_round(
    engine: BenchEngine, prompts: Sequence[list[int]], case: Case, max_tokens: int
) -> RoundRun:
    """Completes all prompts with ``max_tokens`` tokens each."""
    engine.take_part_seconds(case.batch_size)  # forgets what was before
    engine.take_counters()
    wait_for_quiet()
    found = [
        engine.generate(batch, case.temperature, max_tokens)
        for batch in batches(prompts, case.batch_size)
    ]
    count = len(prompts)
    return RoundRun(
        steady=pooled([steady_part(one.arrivals) for one in found]),
        step_tokens=[tokens for one in found for tokens in tokens_of_steps(one.arrivals)],
        request_seconds=sum(one.seconds for one in found) / len(found),
        token_ids=[ids for one in found for ids in one.token_ids][:count],
        texts=[text for one in found for text in one.texts][:count],
        parts=engine.take_part_seconds(case.batch_size),
        counters=engine.take_counters(),
    )
