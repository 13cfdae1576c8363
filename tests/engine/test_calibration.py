"""The measuring tools on live engines: what they write is what the engine did."""

import json
import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner
from vllm.distributed import cleanup_dist_env_and_memory

from sequoia_vllm.calibration.measure_acceptance import (
    AcceptanceSettings,
    AcceptanceTask,
    measure_acceptance,
)
from sequoia_vllm.calibration.measure_profile import ProfileSettings, measure_profile
from sequoia_vllm.cli import app
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.drafters.registry import draft_option
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.measuring.engines import EngineSpec
from sequoia_vllm.verification.sampling import Truncation, lower_outside
from tests.oracles.laws import chi_square, outcomes
from tests.oracles.verification import algorithm_2, children_of, draft_tree
from tests.support.engines import configured
from tests.support.models import DRAFT, MODELS, SMALL, TARGET, save_word_tokenizer
from tests.support.plans import chosen
from tests.support.quicker import look_past_what_is_imported

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PROMPTS = MODELS / "prompts.jsonl"
QUICK = {"dtype": "float32", "enforce_eager": True, "kv_cache_gib": 0.0625}


@pytest.fixture(autouse=True)
def _fresh_process_groups():
    look_past_what_is_imported()
    yield
    cleanup_dist_env_and_memory()


def measure(settings: AcceptanceSettings) -> AcceptanceFile:
    return measure_acceptance(AcceptanceTask.prepare(settings))


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
    state = measure(settings).calibration
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
    found = measure(settings)
    assert found.acceptance == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    # Only the first and the second child have children: there is no second row.
    assert found.calibration.offered[1] == [0] * 6
    assert found.calibration.accepted[0] == [0, 0, 0, 0, found.calibration.trees, 0]


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
def test_tune_then_auto(draft, tmp_path, monkeypatch):
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path))
    result = CliRunner().invoke(
        app,
        [
            "tune", "--model", TARGET, "--draft-model", draft, "--quick",
            "--max-tokens-total", "300", "--batch-sizes", "1,2", "--tokens", "1,4",
            "--context", "64", "--dtype", "float32", "--eager", "--kv-cache-gib", "0.0625",
            "--json",
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
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
