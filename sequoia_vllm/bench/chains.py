"""Searches for vLLM's best chain: predicts all lengths from the longest one.

An engine that drafts chains of 8 shows how often the first i drafts are accepted. A chain of i
drafts would accept as many; with block verification, a little more, as it decides about the whole
chain. We assume that every draft adds the same time to a step. Predictions only choose chains:
each reported result was measured with an engine of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from sequoia_vllm.bench.engines import BenchEngine
from sequoia_vllm.bench.methods import DEFAULT, Method, Sampling, chain, usable_samplings
from sequoia_vllm.bench.rounds import (
    MOST_CHAIN_DRAFTS,
    BenchSettings,
    EngineCase,
    RoundRun,
    run_round,
    warm_up,
)
from sequoia_vllm.drafters.registry import drafts_from_text
from sequoia_vllm.measuring.engines import Progress

# Chains that run in a case: two, and a third if its prediction is within 3 % of the first's.
_SURELY_RUN = 2
_RUN = 3
_CLOSE = 0.97


class Chain(NamedTuple):
    """A chain's length and its sampling."""

    drafts: int
    sampling: Sampling = DEFAULT


class PredictedChain(NamedTuple):
    """A chain, and what a request gets in a step by prediction, and the batch in a second."""

    chain: Chain
    tokens_per_step: float
    tokens_per_second: float


@dataclass(frozen=True)
class ChainSearch:
    """Predictions for vLLM's chains, and the chains chosen to run, shortest first."""

    predicted: dict[EngineCase, list[PredictedChain]]
    chosen: dict[EngineCase, list[Chain]]

    def methods(self, draft: str, case: EngineCase | None = None) -> list[Method]:
        """The chains chosen for a case; None: the chains of all cases, each once."""
        cases = self.chosen.values() if case is None else [self.chosen[case]]
        return [chain(draft, *one) for one in sorted({one for chosen in cases for one in chosen})]


def search_chains(
    settings: BenchSettings,
    plain: BenchEngine,
    most: int,
    open_engine: Callable[[Method], AbstractContextManager[BenchEngine]],
    report: Progress,
) -> ChainSearch:
    """Measures the longest chain with each sampling, and chooses at most ``most`` chains.

    Raises:
        BenchError, CalibrationError: If something cannot be measured.
    """
    base = _rounds(settings, plain, settings.cases)
    sampled = [case for case in settings.cases if case.temperature > 0]
    found: dict[EngineCase, list[PredictedChain]] = {case: [] for case in settings.cases}
    samplings = [DEFAULT]
    for done, sampling in enumerate(samplings):  # grows: the first engine shows what else it can do
        method = chain(settings.engine.draft, MOST_CHAIN_DRAFTS, sampling)
        report(f"looking for the best chain: {method.name}", done, len(samplings))
        with open_engine(method) as engine:
            # vLLM drafts greedily where the draft has another vocabulary, or is text.
            is_greedy = engine.maps_vocabulary or drafts_from_text(settings.engine.draft)
            if sampling == DEFAULT and sampled and not is_greedy:
                samplings += usable_samplings(v2=engine.uses_v2)[1:]
            cases = settings.cases if sampling == DEFAULT else sampled
            for case, longest in _rounds(settings, engine, cases).items():
                found[case] += predict(base[case], longest, sampling)
    return ChainSearch(found, choose(found, most))


def _rounds(
    settings: BenchSettings, engine: BenchEngine, cases: Sequence[EngineCase]
) -> dict[EngineCase, RoundRun]:
    found = {}
    for case in cases:
        warm_up(engine, settings.prompts, case, settings.max_tokens)
        found[case] = run_round(engine, settings.prompts, case, settings.max_tokens)
    return found


def predict(plain: RoundRun, longest: RoundRun, sampling: Sampling) -> list[PredictedChain]:
    """Predicts every chain up to the longest, shortest first.

    Args:
        longest: A round of chains of `MOST_CHAIN_DRAFTS` drafts, in the same case.
    """
    steps = max(1, longest.parts["steps"])
    drafting = (longest.parts["draft"] + longest.parts["drawing"]) / steps
    target = longest.parts["target"] / steps
    first = plain.parts["target"] / max(1, plain.parts["steps"])
    by_draft = max(0.0, target + drafting - first) / MOST_CHAIN_DRAFTS
    tokens, received = 1.0, longest.steady.step_tokens
    found = []
    for length in range(1, MOST_CHAIN_DRAFTS + 1):
        # The share of steps that accepted at least so many drafts: they have more tokens.
        tokens += sum(got > length for got in received) / max(1, len(received))
        seconds = longest.steady.step_seconds - by_draft * (MOST_CHAIN_DRAFTS - length)
        rate = longest.steady.batch_size * tokens / seconds
        found.append(PredictedChain(Chain(length, sampling), tokens, rate))
    return found


def choose(
    found: Mapping[EngineCase, Sequence[PredictedChain]], most: int
) -> dict[EngineCase, list[Chain]]:
    """Chooses the chains to run in each case, at most ``most`` different ones in all.

    Every case first gets its best prediction, then its second, then a close third.
    """
    fastest = {
        case: sorted(predicted, key=lambda one: one.tokens_per_second, reverse=True)
        for case, predicted in found.items()
    }
    wanted = {
        case: [
            one.chain
            for rank, one in enumerate(predicted[:_RUN])
            if rank < _SURELY_RUN
            or one.tokens_per_second >= _CLOSE * predicted[0].tokens_per_second
        ]
        for case, predicted in fastest.items()
    }
    # Greedy cases first: sampled cases can use their chains, where there is no room for more.
    greedy_first = sorted(wanted, key=lambda case: case.temperature > 0)
    engines: list[Chain] = []
    for rank in range(_RUN):
        for case in greedy_first:
            new = [one for one in wanted[case][rank : rank + 1] if one not in engines]
            engines += new[: most - len(engines)]
    chosen = {}
    for case in found:
        running = [one for one in wanted[case] if one in engines]
        if not running:  # too few engines for all cases
            running = [one.chain for one in fastest[case] if one.chain in engines][:1]
        chosen[case] = sorted(running)
    return chosen
