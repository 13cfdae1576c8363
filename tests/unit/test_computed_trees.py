"""Trees computed from the shapes of a pair that the library has none for; the user's directory."""

import json
import logging
import os
import pwd
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import platformdirs
import pytest

from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.adaptation.state import AdaptationState, FadedCounts
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.hardware.model_config import read_shape
from sequoia_vllm.hardware.models import ModelShape, model_classes
from sequoia_vllm.library.files import LibraryError
from sequoia_vllm.library.pair_key import PairKey, PairShapes
from sequoia_vllm.library.tree_library import Selection, TreeLibrary
from sequoia_vllm.library.user_files import (
    adaptation_path,
    make_writable,
    reason_not_to_keep,
    user_directory,
)
from sequoia_vllm.tree import TokenTree

pytest.importorskip("vllm")
from sequoia_vllm.engine.common.step_messages import StepOutcome
from sequoia_vllm.engine.core import adapting
from tests.support.commands import command
from tests.support.models import DRAFT, TARGET
from tests.support.plans import planned

H100, L40S, CPU = "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "AMD EPYC"
UNTIMED = r"no trees for this pair on x86-cpu.*sequoia-vllm tune"
SMALL = model_classes()["7b-68m"]
SHAPES_7B = PairShapes(SMALL.target, SMALL.draft)


def read(path: str) -> ModelShape:
    return read_shape(json.loads((Path(path) / "config.json").read_text()), path)


EMBEDDED = PairShapes(read(TARGET), read(DRAFT))
GROWN = EMBEDDED.target.model_copy(update={"layers": 23, "intermediate": 44864})


def key(device: str, target: str = "/m/t", draft: str = "/m/d", **more) -> PairKey:
    return PairKey(device, target, draft, **{"dtype": "bfloat16", **more})


def content(selection: Selection):
    entry = selection.entry
    return entry.tree, entry.schedule, entry.estimates[0].speedup


def test_a_path_gives_what_the_class_of_its_size_has(library):
    stored = library.entry("l40s/7b-68m/shipped")
    found = library.select(key(L40S), shapes=SHAPES_7B)
    own = {"name": "computed/l40s/6.74b-68m/shipped", "model_class": "6.74b-68m"}
    assert found.entry == stored.model_copy(update=own)


def test_one_line_says_what_was_chosen_from_what(library, caplog):
    with caplog.at_level(logging.INFO, logger="vllm.sequoia"):
        found = library.select(key(L40S, dtype="float16"), shapes=SHAPES_7B)
    assert caplog.messages == [f"Sequoia: {found.reason}"]
    for part in (
        f"{found.entry.tree.size - 1} drafts",
        f"expected {found.entry.estimates[0].speedup:.2f}x",
        "roofline, not measured", f"device {L40S!r} is l40s",
        "computed for a target of 6.74b and a draft of 68m parameters (float16, TP size 1)",
        "acceptance of this pair not measured: the weakest class, shipped",
    ):  # fmt: skip
        assert part in found.reason


def test_the_embedded_pair_on_a_gpu(library):
    """Not the largest class of the library, as when only its path was looked at."""
    found = library.select(key(H100, TARGET, DRAFT), shapes=EMBEDDED)
    assert found.entry.target_parameters == pytest.approx(4.16e6, rel=0.01)
    assert "acceptance embedded-greedy measured on this pair" in found.reason
    large = library.select(key(H100), shapes=SHAPES_7B)
    assert found.entry.estimates[0].speedup < large.entry.estimates[0].speedup


@pytest.mark.parametrize("device", [H100, CPU])
def test_the_spelling_of_a_path_does_not_matter(library, device, monkeypatch, tmp_path):
    monkeypatch.chdir(Path(TARGET).parent)
    moved = tmp_path / "Llama-2-7b-hf"
    shutil.copytree(TARGET, moved)
    first, *others = [
        library.select(key(device, target, DRAFT), shapes=EMBEDDED)
        for target in (TARGET, "target", "./target/", str(moved))
    ]
    for found in others:
        assert content(found) == content(first)
        assert found.reason == first.reason


def test_a_folder_that_contains_a_name_is_not_that_model(library, tmp_path):
    """And other weights of the same shape are another model."""
    folders = []
    for name in ("meta-llama/Llama-2-7b-hf", "examples/models/draft"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        folders.append(str(folder))
    assert "are unknown: the most cautious" in library.select(key(L40S, *folders)).reason
    other = tmp_path / "target"
    shutil.copytree(TARGET, other)
    with (other / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    for pair in (folders, (str(other), DRAFT)):
        with pytest.raises(LibraryError, match=UNTIMED):
            library.select(key(CPU, *pair), shapes=EMBEDDED)


def test_names_on_the_hub_keep_their_entries(library):
    names = SMALL.target.name, SMALL.draft.name
    kept = library.select(key(L40S, *names), shapes=SHAPES_7B)
    assert kept.entry.name == "l40s/7b-68m/shipped"
    for other in ({"tensor_parallel_size": 2}, {"dtype": "float32"}):
        computed = library.select(key(L40S, *names, **other), shapes=SHAPES_7B)
        assert computed.entry.name.startswith("computed/l40s/")
        assert computed.entry.estimates[0].speedup != kept.entry.estimates[0].speedup
    quantized = SMALL.target.model_copy(update={"layer_weight_bytes": 0.5})
    found = library.select(key(L40S, *names), shapes=PairShapes(quantized, SMALL.draft))
    assert "quantized weights" in found.reason
    assert found.entry.estimates[0].speedup < kept.entry.estimates[0].speedup


def test_a_device_without_trees_has_a_datasheet(library):
    found = library.select(key("NVIDIA A10G"), shapes=SHAPES_7B)
    assert "device 'NVIDIA A10G' is a10g; computed for" in found.reason
    assert found.entry.name.startswith("computed/a10g/")
    unknown = library.select(key("NVIDIA Z9000"), shapes=SHAPES_7B)
    assert "nothing but its name is known" in unknown.reason
    assert "computed for" in unknown.reason
    assert unknown.entry.name.split("/")[1] in library.devices()
    whole, part = (
        library.select(key(f"NVIDIA A100-SXM4-80GB{mig}"), shapes=SHAPES_7B)
        for mig in ("", " MIG 3g.40gb")
    )
    assert "MIG slice 3g.40gb; computed for" in part.reason
    assert part.entry.tree.size < whole.entry.tree.size


def test_acceptance_measured_on_the_pair_is_taken(library):
    names = "meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"
    large = model_classes()["70b-8b"]
    shapes = PairShapes(large.target, large.draft)
    found = library.select(key(L40S, *names, tensor_parallel_size=8), shapes=shapes)
    assert found.entry.name == "computed/l40s/70.6b-8.03b/appendix-e"


def learned(vector: list[list[float]], greedy_trees: float) -> AdaptationState:
    """What an engine with a chain of one draft would have left behind."""
    nothing = FadedCounts(trees=0, offered=[[0.0]], accepted=[[0.0]], vector=[[0.0]])
    greedy = nothing.model_copy(update={"vector_trees": greedy_trees, "vector": vector})
    counts = {"greedy": greedy, "sampled": nothing, "mixed": nothing}
    return AdaptationState(
        parents=[-1, 0], schedule=[0, 1], lookup=[0, 1], acceptance=counts, times=[]
    )


def test_acceptance_counted_while_serving_is_taken(library, caplog):
    """From the second start on; where only first children are accepted, a chain is best."""
    pair = key(L40S)
    before = library.select(pair, shapes=SHAPES_7B)
    path = adaptation_path(library.user, pair.file_name)
    learned([[0.9, 0.0]], greedy_trees=1000.0).save(path)
    found = library.select(pair, shapes=SHAPES_7B)
    assert found.entry.name.endswith("/learned")
    assert "acceptance counted while serving greedy requests" in found.reason
    assert (before.entry.temperature, found.entry.temperature) == (None, 0.0)
    assert found.entry.profile.sha256 is None  # it is computed, not measured
    assert found.entry.tree == TokenTree.chain(found.entry.tree.num_speculative_tokens)
    assert found.entry.tree.depth > before.entry.tree.depth
    assert found.entry.estimates[0].speedup > before.entry.estimates[0].speedup
    other = library.select(key(L40S, "/m/other"), shapes=SHAPES_7B)
    assert other.entry.tree == before.entry.tree
    # Too little, or nothing, is not taken.
    learned([[0.9, 0.0]], greedy_trees=100.0).save(path)
    assert library.select(pair, shapes=SHAPES_7B).entry.tree == before.entry.tree
    assert "is not used" not in caplog.text
    path.write_text("{}")
    assert library.select(pair, shapes=SHAPES_7B).entry.tree == before.entry.tree
    assert "is not used" in caplog.text


@pytest.mark.parametrize(
    ("shapes", "more", "reason"),
    [
        (PairShapes(None, SMALL.draft, "/m/t is a mixture of experts"), {}, "/m/t is a mixture"),
        (SHAPES_7B, {"dtype": "float64"}, "dtype 'float64'"),
        (SHAPES_7B, {"tensor_parallel_size": 3}, "cannot be split over 3 devices"),
    ],
)
def test_what_cannot_be_computed_gets_the_nearest_class(library, shapes, more, reason):
    found = library.select(key(L40S, **more), shapes=shapes)
    assert reason in found.reason
    assert "-68m/shipped" in found.entry.name
    assert "is the nearest to a target of" in found.reason


@pytest.mark.parametrize("shapes", [EMBEDDED, PairShapes(GROWN, EMBEDDED.draft), None])
def test_other_pairs_have_no_tree_before_they_are_tuned(library, shapes):
    """Whatever their sizes: times of other models, or of other CPUs, say less than serving does."""
    with pytest.raises(LibraryError, match=UNTIMED):
        library.select(key(CPU), shapes=shapes)


VARIABLE = "SEQUOIA_VLLM_TREES"
PAIR = PairKey("NVIDIA H200", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "bfloat16")


def test_user_directory(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert user_directory() == tmp_path
    monkeypatch.delenv(VARIABLE)
    assert user_directory().name == "trees"
    assert user_directory().parent.name == "sequoia-vllm"


@pytest.fixture
def homeless(monkeypatch):
    for name in (VARIABLE, "HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)


@pytest.fixture(params=["no home", "out of reach", "no directory"])
def nowhere(request, monkeypatch, tmp_path):
    """Nothing can be kept here, whoever runs the tests: root may enter and write everywhere."""
    if request.param == "no home":
        request.getfixturevalue("homeless")
    elif request.param == "out of reach":  # an error for who looks, as where one may not enter
        monkeypatch.setenv(VARIABLE, str(tmp_path / ("x" * 300) / "trees"))
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "trees"))


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(adapting, "logger", logging.getLogger("user files"))
    caplog.set_level(logging.INFO, "user files")
    return caplog


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("is_old", [False, True])  # what platformdirs made of it
def test_who_has_no_home_is_told_the_fix(monkeypatch, is_old):
    if is_old:
        made = "~/.local/share/sequoia-vllm"
        monkeypatch.setattr(platformdirs, "user_data_dir", lambda *_, **__: made)
    with pytest.raises(LibraryError, match=f"no home directory.*set {VARIABLE} to"):
        user_directory()


def test_a_directory_that_can_be_made_is_as_good_as_one(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "not" / "yet"))
    assert reason_not_to_keep() is None
    assert not (tmp_path / "not").exists()
    for _ in range(2):
        make_writable(user_directory())
    assert reason_not_to_keep() is None
    assert user_directory().is_dir()


def test_a_directory_of_somebody_else_is_not(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK | os.X_OK)
    assert VARIABLE in reason_not_to_keep()
    with pytest.raises(LibraryError, match=VARIABLE):
        make_writable(tmp_path)


@pytest.mark.usefixtures("nowhere")
def test_trees_are_chosen_and_shown_as_where_nothing_was_kept_but_not_saved(tmp_path):
    library, empty = TreeLibrary(), TreeLibrary(user=tmp_path / "empty")
    assert library.select(PAIR) == empty.select(PAIR)
    assert library.entries() == empty.entries()
    with pytest.raises(LibraryError, match="no tree named 'user/mine'"):
        library.entry("user/mine")
    command("tree", "show", "h200/8b-1b/shipped")
    with pytest.raises(LibraryError, match=VARIABLE):
        library.save_user_tree(PAIR, library.entry("h200/8b-1b/shipped"))
    with pytest.raises(LibraryError, match=VARIABLE):
        make_writable(library.measurements(PAIR).directory)


def plan_here(**keys):
    config = SequoiaConfig.parse({"method": "sequoia", "model": "some/draft", **keys})
    pair = PairKey("NVIDIA L40S", "/m/timed", "some/draft", "float16")
    return planned(config, pair, shapes=SHAPES_7B, not_kept=reason_not_to_keep())


def warnings(plan):
    return [line for level, line in plan.notes if level == logging.WARNING]


@pytest.mark.usefixtures("nowhere")
def test_engines_keep_nothing_and_say_so_once():
    found = plan_here()
    assert "computed/l40s" in found.settings.tree_source
    assert found.settings.keeps is False
    assert found.settings.adapts_as is not None  # while it runs
    [warning] = warnings(found)
    assert f"set {VARIABLE} to a directory that can be written to" in warning
    with_nothing_to_keep = plan_here(tree={"size": 8}, adapt=False)
    assert with_nothing_to_keep.settings.keeps is False
    assert warnings(with_nothing_to_keep) == []


def test_engines_that_can_keep_say_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert plan_here().settings.keeps
    assert warnings(plan_here()) == []


def follow_an_hour(monkeypatch, keeps: bool) -> None:
    def run_now(target, args, daemon):
        return SimpleNamespace(start=lambda: target(*args))

    monkeypatch.setattr(adapting.threading, "Thread", run_now)
    controller = DraftController(TokenTree.chain(3), [3] * 9, [3] * 9, [3, 1])
    adapter = adapting.SchedulerAdapter(controller, "a-pair", keeps=keeps)
    idle = SimpleNamespace(
        num_scheduled_tokens={}, num_spec_tokens_to_schedule=0, scheduled_new_reqs=[],
        finished_req_ids=[],
    )  # fmt: skip
    for minute in range(60):
        adapter.follow(idle, StepOutcome(), 0, time.perf_counter() + 61 * minute, is_busy=False)


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_learned_is_lost_with_one_warning(log, monkeypatch, keeps):
    """The front end's, which knows already; or the engine core's, where that runs elsewhere."""
    follow_an_hour(monkeypatch, keeps)
    assert len(log.messages) == keeps
    assert all(VARIABLE in message for message in log.messages)


def test_what_is_learned_is_kept(log, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    follow_an_hour(monkeypatch, keeps=True)
    assert (tmp_path / "adaptation" / "a-pair.json").is_file()
    assert log.messages == []
