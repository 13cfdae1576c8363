"""vLLM's chains in the bench, and its turns, without engines."""

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import pytest

from sequoia_vllm.bench import measure
from sequoia_vllm.bench.engines import Arrival, Generation, check_runner
from sequoia_vllm.bench.measure import BenchSettings
from sequoia_vllm.bench.methods import (
    PLAIN,
    BenchError,
    chain,
    chain_of_words,
    is_known,
    sequoia,
    usual_chains,
)
from sequoia_vllm.measuring.engines import EngineSpec

PROBABILISTIC = ("probabilistic",)
BLOCK = ("probabilistic", "block")


@dataclass
class ConfigWithoutBlock:
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"


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
    of_heads = {"draft": "draft_model", "eagle3": "eagle3", "dflash": "dflash"}
    for name, method in of_heads.items():
        found = chain(f"examples/models/{name}", 2).speculative_config
        assert found["method"] == method


@pytest.mark.parametrize(
    ("on_cpu", "draft", "temperatures", "draws"),
    [
        (False, "d", (0.0, 1.0), True),
        (False, "d", (0.0,), False),
        (False, "lookup", (1.0,), False),
        (True, "d", (1.0,), False),
    ],
)
def test_usual_chains_draw_where_that_is_their_best(
    on_cpu, draft, temperatures, draws, monkeypatch
):
    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    sampling = ":probabilistic" if draws else ""
    assert usual_chains(draft, temperatures) == [f"{n}{sampling}" for n in (1, 2, 4)]


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "4:greed", "4:block:block", "4::", "0:ngram"])
def test_no_such_chain(text):
    with pytest.raises(BenchError, match="4:probabilistic:block"):
        chain_of_words("d", text)


def test_a_sampling_that_the_installed_vllm_or_the_runner_lacks(monkeypatch):
    def engine(method, v2):
        return SimpleNamespace(method=method, uses_v2=v2)

    check_runner(engine(chain("d", 4, BLOCK), v2=True))
    check_runner(engine(chain("d", 4, PROBABILISTIC), v2=False))
    with pytest.raises(BenchError, match="Model Runner V1"):
        check_runner(engine(chain("d", 4, BLOCK), v2=False))
    monkeypatch.setattr("vllm.config.SpeculativeConfig", ConfigWithoutBlock)
    with pytest.raises(BenchError, match="no such sampling; give 4"):
        chain_of_words("d", "4:block")


class FakeEngine:
    """An engine that emits a token a step."""

    dtype, tree = "bfloat16", None

    def drafts(self, batch_size):
        return 0

    def generate(self, prompts, temperature, max_tokens):
        steps = [Arrival(place, (1,), place == max_tokens - 1) for place in range(max_tokens)]
        return Generation([[7] * max_tokens], [""], steps)

    def take_part_seconds(self, batch_size):
        return {}

    def take_counters(self):
        return None


def test_methods_take_turns_and_progress_never_jumps_back(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no engine's worker is waited for
    said, started = [], []

    @contextmanager
    def open_engines(methods, engine, options, progress):
        started.append([method.name for method in methods])
        assert options["max_num_batched_tokens"] >= 2 * 128  # for the most drafts of any method
        yield {method.name: FakeEngine() for method in methods}

    settings = BenchSettings(
        EngineSpec("t", "d"), methods=(PLAIN, chain("d", 2), sequoia("d", "auto")),
        prompts=([1], [2]), temperatures=(0.0, 1.0), rounds=2, sampled_chains=False,
    )  # fmt: skip
    found = measure.measure(settings, lambda *given: said.append(given), open_engines)
    assert started == [["plain vLLM", "chain of 2", "Sequoia auto"]]
    greedy, sampled = ([one.method.name for one in runs] for runs in found.runs.values())
    assert (greedy, sampled) == (started[0], ["plain vLLM", "Sequoia auto"])
    turns = [(what, done) for what, done, _ in said if "round" in what]
    assert [done for _, done in turns] == list(range(len(turns)))
    assert {total for what, _, total in said if "round" in what} == {len(turns)}
    for case in ("T=0", "T=1"):
        one, two = (
            [what.split(", ", 2)[2] for what, _ in turns if f"{case}, batch 1: round {n}" in what]
            for n in (1, 2)
        )
        assert two == [*one[1:], one[0]]
