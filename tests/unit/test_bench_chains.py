"""vLLM's chains in the bench, without engines: what they are, and the search for the best."""

import random
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from vllm.config import SpeculativeConfig

from sequoia_vllm.bench import engines, measure
from sequoia_vllm.bench.chains import Chain, PredictedChain, choose, predict, search_chains
from sequoia_vllm.bench.engines import Arrival, Generation, check_runner
from sequoia_vllm.bench.methods import (
    DEFAULT,
    BenchError,
    Kind,
    chain,
    chain_of_words,
    is_known,
    plain,
    sequoia,
    usable_samplings,
)
from sequoia_vllm.bench.rounds import BenchSettings, EngineCase, run_round
from sequoia_vllm.bench.run import results, searched
from sequoia_vllm.measuring.engines import EngineSpec

PROBABILISTIC = ("probabilistic",)
BLOCK = ("probabilistic", "block")
GREEDY, SAMPLED = EngineCase(1, 0.0), EngineCase(1, 1.0)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """No engine's worker is waited for: there is none."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


# -- what chains there are ---------------------------------------------------------------


@dataclass
class ConfigWithoutKeys:
    num_speculative_tokens: int


@dataclass
class ConfigWithoutBlock:
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"


@dataclass
class ConfigWithAll:
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "synthetic", "block", "fly"] = "standard"


@pytest.mark.parametrize(
    ("config", "v2", "expected"),
    [
        (ConfigWithoutKeys, True, [DEFAULT]),
        (ConfigWithoutBlock, True, [DEFAULT, PROBABILISTIC]),
        (ConfigWithAll, True, [DEFAULT, PROBABILISTIC, BLOCK]),
        (ConfigWithAll, False, [DEFAULT, PROBABILISTIC]),
        (SpeculativeConfig, True, [DEFAULT, PROBABILISTIC, BLOCK]),
    ],
)
def test_sampling_is_what_vllms_configuration_and_its_runner_have(
    config, v2, expected, monkeypatch
):
    monkeypatch.setattr("vllm.config.SpeculativeConfig", config)
    assert usable_samplings(v2) == expected


def test_chains_by_name_and_configuration():
    assert chain_of_words("d", " 4") == chain("d", 4)
    assert chain_of_words("d", "4:ngram").speculative_config["method"] == "ngram"  # of CPUs
    found = chain_of_words("d", "4:block:probabilistic")
    assert found.name == "chain of 4, probabilistic, block"
    assert found.speculative_config == {
        "method": "draft_model", "model": "d", "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic", "rejection_sample_method": "block",
    }  # fmt: skip
    assert chain("d", 2, PROBABILISTIC).name == "chain of 2, probabilistic"
    assert not is_known(("telepathic",))


def test_chains_of_a_head_have_its_method():
    methods = [
        chain(f"examples/models/{name}", 2).speculative_config["method"]
        for name in ("draft", "eagle3", "dflash")
    ]
    assert methods == ["draft_model", "eagle3", "dflash"]


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "4:greed", "4:block:block", "4::", "0:ngram"])
def test_no_such_chain(text):
    with pytest.raises(BenchError, match="4:probabilistic:block"):
        chain_of_words("d", text)


def test_a_sampling_that_the_installed_vllm_lacks(monkeypatch):
    monkeypatch.setattr("vllm.config.SpeculativeConfig", ConfigWithoutBlock)
    with pytest.raises(BenchError, match="no such sampling; give 4"):
        chain_of_words("d", "4:block")


def test_a_sampling_that_the_runner_lacks():
    def engine(method, v2):
        return FakeEngine(method, FakePair(v2=v2))

    check_runner(engine(chain("d", 4, BLOCK), v2=True))
    check_runner(engine(chain("d", 4, PROBABILISTIC), v2=False))
    with pytest.raises(BenchError, match="Model Runner V1"):
        check_runner(engine(chain("d", 4, BLOCK), v2=False))


# -- predictions -----------------------------------------------------------------------------


@dataclass
class FakePair:
    """Steps of known times: of which chain is best there is no doubt.

    Attributes:
        accepts: How often each draft after an accepted one is, by (sampled, sampling).
    """

    accepts: float = 0.7
    gain: float = 0.0
    target: float = 0.05
    by_token: float = 0.001
    draft: float = 0.004
    v2: bool = False
    maps_vocabulary: bool = False

    def chance(self, case, sampling):
        drawn = case.temperature > 0 and "probabilistic" in sampling
        return self.accepts + self.gain * drawn

    def seconds(self, drafts):
        return self.target + drafts * (self.by_token + self.draft) + 0.002

    def tokens(self, drafts, chance):
        return sum(chance**i for i in range(drafts + 1))

    def rate(self, chain, case):
        tokens = self.tokens(chain.drafts, self.chance(case, chain.sampling))
        return tokens / self.seconds(chain.drafts)

    def best(self, case, samplings):
        every = [Chain(k, sampling) for sampling in samplings for k in range(1, 9)]
        return max(every, key=lambda one: self.rate(one, case))


class FakeEngine:
    """An engine of a `FakePair`; completions are all alike."""

    def __init__(self, method, pair):
        self.method, self.pair = method, pair
        self.uses_v2, self.maps_vocabulary = pair.v2, pair.maps_vocabulary
        self.dtype = "bfloat16"
        self.tree = None
        self._random = random.Random(0)
        self._steps = 0

    def drafts(self, batch_size):
        return self.method.most_drafts

    def generate(self, prompts, temperature, max_tokens):
        drafts = self.method.most_drafts if self.method.kind is Kind.CHAIN else 0
        chance = self.pair.chance(EngineCase(1, temperature), self.method.sampling)
        arrivals = [Arrival(0.1, (1,) * len(prompts), False)]
        for _ in range(4000):
            got = tuple(self._accepted(drafts, chance) + 1 for _ in prompts)
            now = arrivals[-1].seconds + self.pair.seconds(drafts)
            arrivals.append(Arrival(now, got, False))
        self._steps += 4000
        arrivals[-1] = replace(arrivals[-1], finished=True)
        return Generation([[7] * max_tokens for _ in prompts], ["" for _ in prompts], arrivals)

    def _accepted(self, drafts, chance):
        accepted = 0
        while accepted < drafts and self._random.random() < chance:
            accepted += 1
        return accepted

    def take_part_seconds(self, batch_size):
        steps, self._steps = self._steps, 0
        drafts = self.method.most_drafts if self.method.kind is Kind.CHAIN else 0
        target = self.pair.target + drafts * self.pair.by_token
        return {"target": steps * target, "draft": steps * drafts * self.pair.draft,
                "drawing": 0.0, "verify": 0.0, "steps": steps}  # fmt: skip

    def take_counters(self):
        return None


def of_probe(pair, cases, draft="d"):
    """A search with fake engines, and the methods that were started for it."""
    started = []

    @contextmanager
    def open_engine(method):
        started.append(method.name)
        yield FakeEngine(method, pair)

    settings = BenchSettings(
        EngineSpec("t", draft), methods=(plain(),), prompts=([1], [2]), max_tokens=16,
        temperatures=tuple(case.temperature for case in cases),
    )  # fmt: skip
    found = search_chains(
        settings, FakeEngine(plain(), pair), 6, open_engine, lambda what, done, total: None
    )
    return found, started


def test_predictions_are_what_shorter_chains_do():
    pair = FakePair()
    base, longest = (
        run_round(FakeEngine(method, pair), [[1]], GREEDY, 16)
        for method in (plain(), chain("d", 8))
    )
    for one in predict(base, longest, DEFAULT):
        tokens = pair.tokens(one.chain.drafts, pair.accepts)
        assert one.tokens_per_step == pytest.approx(tokens, rel=0.03)
        assert one.tokens_per_second == pytest.approx(pair.rate(one.chain, GREEDY), rel=0.03)
    alike = predict(base, longest, DEFAULT)[-1]
    assert alike.tokens_per_second == pytest.approx(longest.steady.tokens_per_second)


@pytest.mark.parametrize("accepts", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("draft", [0.001, 0.01])
def test_the_best_chain_is_among_those_chosen(accepts, draft):
    pair = FakePair(accepts=accepts, draft=draft)
    found, _ = of_probe(pair, [GREEDY])
    assert pair.best(GREEDY, [DEFAULT]) in found.chosen[GREEDY]
    assert 2 <= len(found.chosen[GREEDY]) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.15, -0.15])
def test_the_better_sampling_is_chosen_where_it_matters(gain):
    pair = FakePair(accepts=0.7, gain=gain, v2=True)
    found, _ = of_probe(pair, [GREEDY, SAMPLED])
    assert {one.sampling for one in found.chosen[GREEDY]} == {DEFAULT}
    best = pair.best(SAMPLED, [DEFAULT, PROBABILISTIC])
    assert (best.sampling == DEFAULT) == (gain < 0)
    drawn = {"probabilistic" in one.sampling for one in found.chosen[SAMPLED]}
    assert ("probabilistic" in best.sampling) in drawn


@pytest.mark.parametrize(
    ("cases", "v2", "engines"),
    [
        ([GREEDY], True, ["chain of 8"]),
        ([GREEDY, SAMPLED], False, ["chain of 8", "chain of 8, probabilistic"]),
        ([SAMPLED], True,
         ["chain of 8", "chain of 8, probabilistic", "chain of 8, probabilistic, block"]),
    ],
)  # fmt: skip
def test_one_engine_is_started_for_each_sampling_that_matters(cases, v2, engines):
    assert of_probe(FakePair(v2=v2), cases)[1] == engines


def test_chains_of_drafts_with_another_vocabulary_draft_greedily():
    _, started = of_probe(FakePair(v2=True, maps_vocabulary=True), [GREEDY, SAMPLED])
    assert started == ["chain of 8"]


def test_without_a_draft_the_best_n_gram_chain_is_looked_for():
    found, started = of_probe(FakePair(v2=True), [GREEDY, SAMPLED], "lookup")
    assert started == ["n-gram chain of 8"]
    names = [method.name for method in found.methods("lookup")]
    assert names == [f"n-gram chain of {one.drafts}" for one in found.chosen[GREEDY]]


def predicted(**rates):
    """Chains k1, k2, ... of vLLM's default sampling, with their tokens per second."""
    return [PredictedChain(Chain(int(name[1:])), 2.0, rate) for name, rate in rates.items()]


def test_a_third_chain_only_if_it_is_close():
    close = predicted(k1=80, k2=100, k3=98, k4=97.5)
    far = predicted(k1=80, k2=100, k3=98, k4=96)
    [one, other] = (choose({GREEDY: found}, 6)[GREEDY] for found in (close, far))
    assert [chain.drafts for chain in one] == [2, 3, 4]
    assert [chain.drafts for chain in other] == [2, 3]


def test_every_case_gets_its_best_before_any_gets_another():
    found = {
        EngineCase(1, 0.0): predicted(k1=1, k5=10, k6=9),
        EngineCase(4, 0.0): predicted(k1=5, k3=10, k5=7),
        EngineCase(16, 0.0): predicted(k1=10, k3=6, k5=2),
    }

    def lengths(most):
        return [[chain.drafts for chain in chains] for chains in choose(found, most).values()]

    assert lengths(3) == [[5], [3, 5], [1, 3]]
    assert lengths(4) == [[5, 6], [3, 5], [1, 3]]
    assert lengths(1) == [[5], [5], [5]]


# -- the whole comparison ------------------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch):
    """A comparison with fake engines: settings to what was measured, and who was started."""
    pair = FakePair(gain=0.1)
    started = []

    @contextmanager
    def open_engines(methods, engine, options, progress):
        started.append([method.name for method in methods])
        assert options["max_num_batched_tokens"] >= 2 * 128
        yield {method.name: FakeEngine(method, pair) for method in methods}

    def run(available_gib, progress=None):
        monkeypatch.setattr(engines, "_available_gib", lambda: available_gib)
        settings = BenchSettings(
            EngineSpec("t", "d", kv_cache_gib=1.0), methods=(plain(), sequoia("d", "auto")),
            search_chains=True, prompts=([1], [2]), temperatures=(0.0, 1.0), rounds=2,
        )  # fmt: skip
        assert settings.most_drafts == 127
        return measure.measure(settings, progress, open_engines), started, pair

    return run


def test_chains_found_are_run_with_the_methods_of_their_case(compared):
    found, started, pair = compared(1e6)
    assert started[:3] == [
        ["plain vLLM", "Sequoia auto"], ["chain of 8"], ["chain of 8, probabilistic"],
    ]  # fmt: skip
    assert found.search is not None
    for case, runs in found.runs.items():
        names = [one.method.name for one in runs]
        chains = [method.name for method in found.search.methods("d", case)]
        assert names == ["plain vLLM", *chains, "Sequoia auto"]
        assert set(chains) <= set(started[3])
        assert all(len(one.rounds) == 2 for one in runs)
        best = pair.best(case, [DEFAULT, PROBABILISTIC])
        assert chain("d", best.drafts, best.sampling).name in chains
    [best] = [r for r in results(found, lambda runs, case: None, chain_is_wrong=False)
              if r.best_chain and r.temperature == 1]  # fmt: skip
    assert "probabilistic" in best.method

    rows = searched(found.search, "d")
    assert len(rows) == 8 + 16
    assert {row.method for row in rows if row.run} == set(started[3])
    assert [row.sampling for row in rows[::8]] == [[], [], ["probabilistic"]]


def test_no_more_chains_than_there_is_memory_for(compared):
    found, started, _ = compared(6.5)  # three engines of 1.7 GiB
    assert len(started[-1]) == 1
    assert all(len(chosen) == 1 for chosen in found.search.chosen.values())


def test_methods_take_turns_and_progress_never_jumps_back(compared):
    said = []
    compared(1e6, lambda *given: said.append(given))
    turns = [(what, done) for what, done, _ in said if "round" in what]
    assert [done for _, done in turns] == list(range(len(turns)))
    assert {total for what, _, total in said if "round" in what} == {len(turns)}
    for case in ("T=0", "T=1"):
        one, two = (
            [what.split(", ", 2)[2] for what, _ in turns if f"{case}, batch 1: round {n}" in what]
            for n in (1, 2)
        )
        assert two == [*one[1:], one[0]]
