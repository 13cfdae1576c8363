"""Looks for vLLM's best chain on live engines (`chain_search` says how it is chosen)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sequoia_vllm.bench.chain_sampling import DEFAULT, ChainSampling, usable
from sequoia_vllm.bench.chain_search import MOST_DRAFTS, Chain, Predicted, choose, predict
from sequoia_vllm.bench.engines import BenchEngine
from sequoia_vllm.bench.methods import Method, chain
from sequoia_vllm.bench.rounds import Case, RoundRun, run_round, warm_up
from sequoia_vllm.measuring.engines import Progress

OpenEngine = Callable[[Method], AbstractContextManager[BenchEngine]]


@dataclass(frozen=True)
class ChainSearch:
    """What was predicted of vLLM's chains, and which were chosen to be run.

    Attributes:
        predicted: In each case.
        chosen: In each case; shortest first.
    """

    predicted: dict[Case, list[Predicted]]
    chosen: dict[Case, list[Chain]]

    def methods(self, draft: str, case: Case | None = None) -> list[Method]:
        """The chains chosen for a case; None: for any, each once."""
        cases = self.chosen.values() if case is None else [self.chosen[case]]
        chains = dict.fromkeys(chain for chosen in cases for chain in chosen)
        ordered = sorted(chains, key=lambda one: (one.drafts, one.sampling.words))
        return [chain(draft, one.drafts, one.sampling) for one in ordered]


@dataclass(frozen=True)
class ChainProbe:
    """How chains are looked for.

    Attributes:
        draft: The draft model.
        cases: In which the best is wanted.
        prompts: Token ids; every probe completes all of them once in each case.
        max_tokens: Tokens of every completion.
        open_engine: Starts an engine, with room for chains of 8.
        report: Called with (what is done, probes done, probes in all as far as known).
    """

    draft: str
    cases: Sequence[Case]
    prompts: Sequence[list[int]]
    max_tokens: int
    open_engine: OpenEngine
    report: Progress

    def search(self, plain: BenchEngine, most: int) -> ChainSearch:
        """Measures the longest chain with each sampling, and chooses at most ``most`` chains.

        Args:
            plain: A running engine without speculation.
            most: Chains to choose, all cases together.

        Raises:
            BenchError, CalibrationError: If something cannot be measured.
        """
        base = self._rounds(plain, self.cases)
        sampled = [case for case in self.cases if case.temperature > 0]
        found: dict[Case, list[Predicted]] = {case: [] for case in self.cases}
        waiting = [DEFAULT]
        done = 0
        while waiting:
            sampling = waiting.pop(0)
            method = chain(self.draft, MOST_DRAFTS, sampling)
            self.report(f"looking for the best chain: {method.name}", done, done + 1 + len(waiting))
            with self.open_engine(method) as engine:
                if sampling == DEFAULT and sampled:
                    waiting = self._others(engine)
                cases = self.cases if sampling == DEFAULT else sampled
                for case, longest in self._rounds(engine, cases).items():
                    found[case] += predict(base[case], longest, sampling)
            done += 1
        return ChainSearch(found, choose(found, most))

    @staticmethod
    def _others(engine: BenchEngine) -> list[ChainSampling]:
        if engine.maps_vocabulary:
            return []
        return [one for one in usable(v2=engine.uses_v2) if one != DEFAULT]

    def _rounds(self, engine: BenchEngine, cases: Sequence[Case]) -> dict[Case, RoundRun]:
        found = {}
        for case in cases:
            warm_up(engine, self.prompts, case, self.max_tokens)
            found[case] = run_round(engine, self.prompts, case, self.max_tokens)
        return found
