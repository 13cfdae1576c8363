"""Trees computed from the shapes of a pair that the library has none for."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from sequoia_vllm.adaptation.state import AdaptationState, FadedCounts
from sequoia_vllm.hardware.model_config import read_shape
from sequoia_vllm.hardware.models import ModelShape, model_classes
from sequoia_vllm.library.files import LibraryError
from sequoia_vllm.library.pair_key import PairKey, PairShapes
from sequoia_vllm.library.tree_library import Selection, TreeLibrary
from sequoia_vllm.library.user_files import adaptation_path
from sequoia_vllm.tree import TokenTree
from tests.support.models import DRAFT, TARGET

H100, L40S, CPU = "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "AMD EPYC"
UNTIMED = r"no trees for this pair on x86-cpu.*sequoia-vllm tune"
SMALL = model_classes()["7b-68m"]
SHAPES_7B = PairShapes(SMALL.target, SMALL.draft)


def read(path: str) -> ModelShape:
    return read_shape(json.loads((Path(path) / "config.json").read_text()), path)


EMBEDDED = PairShapes(read(TARGET), read(DRAFT))
GROWN = EMBEDDED.target.model_copy(update={"layers": 23, "intermediate": 44864})


@pytest.fixture
def library(tmp_path) -> TreeLibrary:
    """The shipped trees, and no trees of the user's own."""
    return TreeLibrary(user=tmp_path / "user")


def key(device: str, target: str = "/m/t", draft: str = "/m/d", **more) -> PairKey:
    return PairKey(device, target, draft, **{"dtype": "bfloat16", **more})


def content(selection: Selection):
    entry = selection.entry
    return entry.tree, entry.schedule, entry.estimates[0].speedup


# -- on GPUs: the roofline ---------------------------------------------------------


def test_a_path_gives_what_the_class_of_its_size_has(library):
    stored = library.entry("l40s/7b-68m/shipped")
    found = library.select(key(L40S), shapes=SHAPES_7B)
    assert found.entry.tree == stored.tree
    assert found.entry.schedule == stored.schedule
    assert found.entry.estimates == stored.estimates


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
    found = [
        library.select(key(device, target, DRAFT), shapes=EMBEDDED)
        for target in (TARGET, "target", "./target/", os.path.relpath(TARGET, "/"), str(moved))
        if Path(target).is_dir()
    ]
    assert len(found) >= 4
    assert all(content(selection) == content(found[0]) for selection in found)
    assert len({selection.reason for selection in found}) == 1


def test_a_folder_that_contains_a_name_is_not_that_model(library, tmp_path):
    folders = []
    for name in ("meta-llama/Llama-2-7b-hf", "examples/models/draft"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        folders.append(str(folder))
    assert "are unknown: the most cautious" in library.select(key(L40S, *folders)).reason
    with pytest.raises(LibraryError, match=UNTIMED):
        library.select(key(CPU, *folders), shapes=EMBEDDED)


def test_other_weights_of_the_same_shape_are_another_model(library, tmp_path):
    shutil.copytree(TARGET, tmp_path / "target")
    with (tmp_path / "target" / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(LibraryError, match=UNTIMED):
        library.select(key(CPU, str(tmp_path / "target"), DRAFT), shapes=EMBEDDED)


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
    unknown = library.select(key("NVIDIA Z9000"), shapes=SHAPES_7B)
    assert "nothing but its name is known" in unknown.reason
    assert "computed for" in unknown.reason


def test_a_slice_is_a_smaller_device(library):
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
    return AdaptationState(
        parents=[-1, 0],
        schedule=[0, 1],
        lookup=[0, 1],
        acceptance={"greedy": greedy, "sampled": nothing, "mixed": nothing},
        times=[],
    )


def test_acceptance_counted_while_serving_is_taken(library):
    """From the second start on; where only first children are accepted, a chain is best."""
    pair = key(L40S)
    before = library.select(pair, shapes=SHAPES_7B)
    path = adaptation_path(library.user, pair.file_name)
    learned([[0.9, 0.0]], greedy_trees=1000.0).save(path)
    found = library.select(pair, shapes=SHAPES_7B)
    assert found.entry.name.endswith("/learned")
    assert "acceptance counted while serving greedy requests" in found.reason
    assert found.entry.tree == TokenTree.chain(found.entry.tree.num_speculative_tokens)
    assert found.entry.tree.depth > before.entry.tree.depth
    assert found.entry.estimates[0].speedup > before.entry.estimates[0].speedup
    other = library.select(key(L40S, "/m/other"), shapes=SHAPES_7B)
    assert other.entry.tree == before.entry.tree


@pytest.mark.parametrize("content", ["few", "no state"])
def test_too_little_or_nothing_that_was_counted_is_not_taken(library, content, caplog):
    pair = key(L40S)
    before = library.select(pair, shapes=SHAPES_7B)
    path = adaptation_path(library.user, pair.file_name)
    learned([[0.9, 0.0]], greedy_trees=100.0).save(path)
    if content == "no state":
        path.write_text("{}")
    assert library.select(pair, shapes=SHAPES_7B).entry.tree == before.entry.tree
    assert ("is not used" in caplog.text) == (content == "no state")


def test_the_users_own_tree_comes_first(library):
    pair = key(L40S, TARGET, DRAFT)
    library.save_user_tree(pair, library.entry("h200/8b-1b/shipped"))
    assert library.select(pair, shapes=EMBEDDED).entry.name.startswith("user/")


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


# -- on CPUs: the pairs that were measured there -----------------------------------


@pytest.mark.parametrize("shapes", [EMBEDDED, PairShapes(GROWN, EMBEDDED.draft), None])
def test_other_pairs_have_no_tree_before_they_are_tuned(library, shapes):
    """Whatever their sizes: times of other models, or of other CPUs, say less than serving does."""
    with pytest.raises(LibraryError, match=UNTIMED):
        library.select(key(CPU), shapes=shapes)
