"""vLLM's chains in the bench, and its turns, without engines."""

import dataclasses
import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal, get_args

import pytest
from vllm.config import SpeculativeConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.speculative import SpeculativeMethod

from sequoia_vllm.bench import measure
from sequoia_vllm.bench.engines import Arrival, BenchEngine, Generation, check_runner
from sequoia_vllm.bench.measure import BenchSettings
from sequoia_vllm.bench.methods import (
    ARCTIC,
    PLAIN,
    BenchError,
    chain,
    chain_of_words,
    is_known,
    methods,
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


@pytest.fixture
def on_gpu(monkeypatch):
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4/2@9/0@33", "chain of 4, 2 from 9 requests, 0 from 33 requests"),
        ("2/5@2:probabilistic", "chain of 2, 5 from 2 requests, probabilistic"),
        ("5/3@4:ngram", "n-gram chain of 5, 3 from 4 requests"),
    ],
)
def test_numbers_of_drafts_by_batch_size_are_vllms(text, name):
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    found = chain_of_words("d", text)
    config = found.speculative_config
    ranges = config["num_speculative_tokens_per_batch_size"]
    lookup = build_dynamic_sd_schedule_lookup(ranges, 64, config["num_speculative_tokens"])
    assert [found.chain_drafts(batch) for batch in range(1, 65)] == lookup[1:]
    assert (found.name, found.most_drafts) == (name, max(lookup))
    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert set(config) <= fields
    assert chain("d", 4).chain_drafts(7) == 4


@pytest.mark.parametrize("text", ["4/2@1", "4/2@9/1@9", "4/2@9/1@5"])
def test_ranges_are_in_order(text):
    with pytest.raises(BenchError, match="from 2 up, in order"):
        chain_of_words("d", text)


def test_suffixes_need_their_package(monkeypatch):
    with pytest.raises(BenchError, match=f"pip install {ARCTIC}"):
        chain_of_words("d", "15:suffix")
    stub = object.__new__(SpeculativeConfig)
    with pytest.raises(ImportError, match=ARCTIC):  # vLLM asks for the same
        stub._validate_suffix_decoding()
    monkeypatch.setattr("vllm.utils.import_utils.has_arctic_inference", lambda: True)
    for draft in ("d", "lookup"):
        found = chain_of_words(draft, "15:suffix")
        assert found.name == "suffix chain of 15"
        assert found.speculative_config == {"method": "suffix", "num_speculative_tokens": 15}
    assert "suffix" in get_args(SpeculativeMethod)


def test_adaptive_verification_is_of_dspark_heads(tmp_path, monkeypatch):
    for draft in ("d", "examples/models/dflash"):
        with pytest.raises(BenchError, match="with DSpark heads alone"):
            chain_of_words(draft, "7:adaptive")
    config = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = chain_of_words(str(tmp_path), "7:adaptive")
    assert found.name == "chain of 7, adaptive"
    assert found.speculative_config == {
        "method": "dspark", "model": str(tmp_path), "num_speculative_tokens": 7,
        "enable_adaptive_verification": True,
    }  # fmt: skip
    assert "enable_adaptive_verification" in {x.name for x in dataclasses.fields(SpeculativeConfig)}
    monkeypatch.setattr("vllm.config.SpeculativeConfig", ConfigWithoutBlock)
    with pytest.raises(BenchError, match="does not know it"):
        chain_of_words(str(tmp_path), "7:adaptive")


def test_full_graphs_come_with_plain_vllm_that_has_them_too(on_gpu):
    found = methods("d", ["3", "3:full"], ["served"])
    names = "plain vLLM; plain vLLM, full graphs; chain of 3; chain of 3, full graphs; Sequoia"
    assert "; ".join(one.name for one in found) == names
    graphs = {"compilation_config": {"cudagraph_mode": "FULL"}}
    assert [one.engine_options for one in found] == [{}, graphs, {}, graphs, {}]
    assert CUDAGraphMode["FULL"].has_full_cudagraphs()
    assert chain_of_words("d", "4:ngram:full").speculative_config["method"] == "ngram_gpu"


def test_full_graphs_need_a_gpu_and_an_engine_that_captures_them():
    with pytest.raises(BenchError, match="need a GPU"):
        chain_of_words("d", "3:full")
    one = replace(chain("d", 3), full_graphs=True)
    check_runner(SimpleNamespace(method=one, has_full_graphs=True))
    with pytest.raises(BenchError, match="without full CUDA graphs"):
        check_runner(SimpleNamespace(method=one, has_full_graphs=False))
    for mode in CUDAGraphMode:
        engine = object.__new__(BenchEngine)
        config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
        engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
        assert engine.has_full_graphs == (mode is CUDAGraphMode.FULL)


WRONG = ["", "x", "0", "-1", "4:greed", "4:block:block", "4::", "0:ngram", "4/2", "4@2", "4/2@0",
         "4:ngram:suffix", "4:suffix:block", "4:ngram:adaptive"]  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
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
