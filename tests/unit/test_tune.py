"""From measurements to the tree that "auto" picks, without an engine."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sequoia_vllm.cli.advise import _measured_times
from sequoia_vllm.cli.tune import quick_engine, tuned_entry
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.hardware.choose import choose_schedule
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import current_cpu_name
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.measuring.engines import EngineSpec
from sequoia_vllm.measuring.provenance import synthetic_models
from tests.support.commands import command, in_words
from tests.support.models import DRAFT, TARGET
from tests.support.plans import chosen

TUNE = "sequoia_vllm.cli.tune"
HERE = PairKey(current_cpu_name(), TARGET, DRAFT, "float32")
BATCHES, CONTEXTS, SIZES = (1, 8), (256, 1024), (1, 2, 4, 8, 16, 32)


def vector(**changes) -> AcceptanceFile:
    return AcceptanceFile(
        name="measured", description="made up", source="measured", date="2026-01-01",
        target=TARGET, draft=DRAFT, temperature=0.0, acceptance=[0.6, 0.12, 0.06, 0.03, 0.01],
    ).model_copy(update=changes)  # fmt: skip


def times(target_ms: float, per_token_ms: float) -> Profile:
    """A target pass that costs a fixed time, and more for each token of the batch."""
    places = [{"batch_size": n, "context_length": c} for n in BATCHES for c in CONTEXTS]
    return Profile(
        source="measured", date="2026-01-01", device=HERE.device, target=TARGET, draft=DRAFT,
        target_parameters=4e6, draft_parameters=2e6, dtype="float32",
        target_forward=[
            {
                **place, "tokens": list(SIZES),
                "seconds": [
                    1e-3 * (target_ms + per_token_ms * place["batch_size"] * n) for n in SIZES
                ],
            }
            for place in places
        ],
        draft_level=[{**place, "tokens": [1, 16], "seconds": [1e-3, 1e-3]} for place in places],
        verification=[{**place, "tokens": [2, 32], "seconds": [2e-4, 3e-4]} for place in places],
        overhead=[
            {**place, "plain_seconds": 5e-4, "tree_seconds": 1e-3, "commit_seconds": 1e-4}
            for place in places
        ],
    )  # fmt: skip


PAYS, DOES_NOT_PAY = times(60, 0.5), times(0.5, 1.0)


def auto(target: str = TARGET, draft: str = DRAFT, tree: str | None = "auto"):
    pair = replace(HERE, target=target, draft=draft)
    return chosen(SequoiaConfig(model=draft, tree=tree).loaded(), pair)


def test_the_entry_is_the_best_schedule_of_the_context():
    entry = tuned_entry(vector(), PAYS, context_length=1024, max_size=32)
    expected = choose_schedule(
        vector().vector, PAYS, batch_sizes=range(1, 9), max_size=32, context_length=1024
    )
    assert (entry.tree, entry.schedule) == (expected.tree, expected.ranges)
    assert entry.profile.context_length == 1024
    assert entry.tree.size > 4
    assert tuned_entry(vector(), PAYS, 256, max_size=4).tree.size == 4


def test_auto_picks_the_tuned_tree(library):
    entry = tuned_entry(vector(), PAYS, 256, 32)
    path = library.save_user_tree(HERE, entry)
    choice = auto()
    assert choice.tree == entry.tree
    assert f"tuned here ({path})" in choice.source
    assert choice.schedule == entry.schedule
    assert library.entries()[0].profile.file == f"measurements/{path.stem}/profile.json"


def test_a_tree_tuned_for_drafts_from_text_is_picked_and_no_other(library):
    pair, config = replace(HERE, draft="lookup"), SequoiaConfig(drafter="lookup")
    assert "the library has trees for models and heads" in chosen(config, pair).source
    timed = PAYS.model_copy(update={"draft": "lookup", "draft_parameters": 0})
    entry = tuned_entry(vector(draft="lookup"), timed, 256, 32)
    assert entry.model_class == "4m-lookup"
    library.save_user_tree(pair, entry)
    choice = chosen(config, pair)
    assert choice.tree == entry.tree
    assert "tuned here" in choice.source


def test_no_speculation_is_an_answer(library):
    entry = tuned_entry(vector(), DOES_NOT_PAY, 256, 32)
    assert entry.tree.size == 1
    assert entry.schedule == [(1, 8, 0)]
    library.save_user_tree(HERE, entry)
    assert auto().tree.size == 1
    assert auto(tree=None).tree.size == 16  # without "auto" some tree is always used


def test_a_directory_is_one_model_however_it_is_written(library, monkeypatch):
    library.save_user_tree(HERE, tuned_entry(vector(), PAYS, 256, 32))
    monkeypatch.chdir(Path(TARGET).parent)
    for target in ("target", "./target/", str(Path("..") / Path(TARGET).parent.name / "target")):
        assert "tuned here" in auto(target, os.path.relpath(DRAFT)).source
    assert "tuned here" not in auto(draft=TARGET).source
    key = PairKey("cpu", "no/such/directory", "d", "float32")
    assert key.file_name == replace(key, target="no/such/directory/").file_name


def test_times_of_a_tuned_tree_are_found_until_they_are_gone(library):
    path = library.measurements(HERE).profile
    PAYS.save(path)
    library.save_user_tree(HERE, tuned_entry(vector(), PAYS, 256, 32))
    [entry] = (entry for entry in library.entries() if entry.name.startswith("user/"))
    assert _measured_times(library, entry) == PAYS
    path.unlink()
    assert _measured_times(library, entry) is None


def test_cost_adds_verification_and_takes_the_context_asked_for():
    slow_rest = [
        entry.model_copy(update={"plain_seconds": 0.5}) if entry.context_length == 1024 else entry
        for entry in PAYS.overhead
    ]
    cost = CostModel(PAYS.model_copy(update={"overhead": slow_rest}), context_length=900)
    assert cost.plain_seconds(1) == pytest.approx(0.5 + 0.0605)
    assert CostModel(PAYS).plain_seconds(1) == pytest.approx(0.0005 + 0.0605)
    assert cost.verification_seconds([2, 17, 32], 1) == pytest.approx([2e-4, 2.5e-4, 3e-4])
    tree = tuned_entry(vector(), PAYS, 256, 32).tree
    verified, unverified = (
        CostModel(profile).estimate(tree, vector().vector, 1).seconds
        for profile in (PAYS, PAYS.model_copy(update={"verification": None}))
    )
    growth = float(CostModel(PAYS).verification_seconds(tree.size, 1))
    assert verified - unverified == pytest.approx(growth)


@pytest.fixture
def call(library, monkeypatch):
    """The command, with these measurements: its result, which is read if it is JSON."""

    def run(acceptance: AcceptanceFile, profile: Profile, *more: str, target: str = TARGET):
        monkeypatch.setattr("sequoia_vllm.cli.measuring.check_models", lambda *_: None)  # slow
        monkeypatch.setattr(f"{TUNE}.count", lambda *_: acceptance)
        monkeypatch.setattr(f"{TUNE}.time_steps", lambda *_: profile)
        options = ["--dtype", "float32", "--context", "256", *more]
        done = command("tune", "--model", target, "--draft-model", DRAFT, *options)
        return json.loads(done.stdout) if "--json" in more else in_words(done.output)

    return run


def test_tune(call, library):
    report = call(vector(), PAYS, "--json")
    assert report["speculates"]
    assert report["tree"]["size"] == auto().tree.size
    assert report["now_used"] == auto().source
    assert report["command"].startswith(f"vllm serve {TARGET} --speculative-config '{{")
    config = {"method": "sequoia", "model": DRAFT, "tree": "auto"}
    assert json.loads(report["command"].split("'")[1]) == config
    kept = library.measurements(HERE)
    assert str(kept.directory) == report["measurements"]
    assert report["picture"] == str(kept.directory / "tree.svg")
    assert "<svg" in Path(report["picture"]).read_text()
    assert Profile.load(kept.profile) == PAYS
    assert AcceptanceFile.load(kept.acceptance) == vector()


def test_larger_trees_are_timed_where_weights_come_from_a_disk(library, tmp_path, monkeypatch):
    timed = []

    def measured(settings, vectors, stage):
        timed.append(settings.tokens[-1])
        return PAYS

    monkeypatch.setattr(f"{TUNE}.count", lambda *_: vector())
    monkeypatch.setattr(f"{TUNE}.time_steps", measured)
    for more in ([], ["--offload-directory", tmp_path]):
        command("tune", "--model", TARGET, "--draft-model", DRAFT, "--quick", *more)
    assert timed == [32, 128]


def test_tune_says_how_well_it_knows(call):
    counted = vector(acceptance=[0.7, 0.1], trials=[1000, 1000])
    known = call(counted, PAYS, "--json")["tokens_margins"]
    assert all(0 < margin < 0.3 for margin in known)
    assert f" ±{known[0]:.2f}" in call(counted, PAYS)
    assert call(vector(), PAYS, "--json")["tokens_margins"] == [None] * len(known)


def test_tune_says_what_it_expects(call):
    shown = call(vector(), PAYS)
    assert "256 tokens of context" in shown
    assert "In use from now on: tree user/" in shown
    assert "vllm serve" in shown
    shown = call(vector(), DOES_NOT_PAY)
    assert "none: plain decoding" in shown
    assert "speculation does not pay here: every tree is slower than plain decoding" in shown


def test_synthetic_targets_are_named(call, tmp_path):
    """Times measured on one must not pass for those of a trained model of its size."""
    made = tmp_path / "made"
    shutil.copytree(TARGET, made)
    config = json.loads((made / "config.json").read_text())
    mark = {"from": "org/small", "parameters": 800_000_000}
    (made / "config.json").write_text(json.dumps({**config, "sequoia_grown": mark}))
    assert synthetic_models(str(made), DRAFT) == {"target": mark}
    assert synthetic_models(TARGET, DRAFT) == {}
    shown = call(vector(target=str(made)), PAYS, target=str(made))
    assert "the target is a synthetic target: it computes what org/small does" in shown
    assert "at the cost of 800 million parameters" in shown


@pytest.mark.parametrize(
    ("parameters", "is_cpu", "eager", "expected"),
    [(8e8, True, False, True), (4e6, True, False, False), (8e8, False, False, False),
     (4e6, True, True, True)],
)  # fmt: skip
def test_quick_does_not_compile_a_large_target_for_a_cpu(
    monkeypatch, parameters, is_cpu, eager, expected
):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: is_cpu)
    monkeypatch.setattr(f"{TUNE}.count_parameters", lambda model: parameters)
    engine = quick_engine(EngineSpec("t", "d", dtype="float32", enforce_eager=eager))
    assert engine == EngineSpec("t", "d", dtype="float32", enforce_eager=expected)
