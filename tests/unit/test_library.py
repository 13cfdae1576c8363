"""The library: valid, reproducible, found by device name, and extended by measured files."""

import logging
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.generate_trees import COMMAND, generate_library
from sequoia_vllm.hardware.device import known_devices
from sequoia_vllm.hardware.models import every_class
from sequoia_vllm.hardware.step_profile import Profile, ProfileError
from sequoia_vllm.library import tree_library as library_module
from sequoia_vllm.library.files import AcceptanceFile, LibraryError
from sequoia_vllm.library.pair_key import PairKey, is_same_model
from sequoia_vllm.library.selection import (
    OFFLOADED,
    best_entry,
    choose_vector,
    fastest_schedule,
    profile_reference,
    selection,
)
from sequoia_vllm.library.tree_library import TreeLibrary, shipped_directory
from sequoia_vllm.tree import MOST_NODES, Acceptance, AcceptanceError, TokenTree
from tests.support.reference_trees import drafts_at
from tests.unit.test_tune import PAYS, vector

SAMPLE = {"h100-sxm", "x86-cpu"}  # predicted and measured


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices", [SAMPLE, pytest.param(None, marks=pytest.mark.sharded)], ids=["some", "all"]
)
def test_generated_again_byte_for_byte(devices):
    generated = generate_library(shipped_directory(), devices=devices)
    shipped = {
        path.name: path.read_text(encoding="utf-8")
        for path in shipped_directory().glob("*.json")
        if devices is None or path.stem in devices
    }
    assert sorted(shipped) == sorted(generated), f"run: {COMMAND}"
    stale = [name for name, text in generated.items() if shipped[name] != text]
    assert not stale, f"run: {COMMAND}"


def test_every_device_of_the_table_has_trees(library):
    wanted = {device.id for device in known_devices().values() if device.library}
    assert wanted <= set(library.devices())


def test_every_entry_is_what_it_says(library):
    losses = []
    for entry in library.entries():
        tree = library.entry(entry.name).tree
        acceptance = Acceptance.of(entry.acceptance)
        assert tree == tree.sorted_by_value(acceptance), entry.name
        prefixes = np.cumsum(tree.values(acceptance))
        for estimate in entry.estimates:
            drafts = drafts_at(entry.schedule, estimate.batch_size)
            assert estimate.num_speculative_tokens == drafts
            assert estimate.expected_tokens == pytest.approx(prefixes[drafts], abs=1e-4)
            assert estimate.speedup >= 1.0
            assert estimate.speedup <= estimate.optimum + 1e-4
        losses.append([1 - e.speedup / e.optimum for e in entry.estimates])
        assert entry.profile.source in ("measured", "roofline")
        assert entry.profile.date
        if entry.profile.source == "roofline":
            assert entry.profile.assumptions
            assert library.file(entry.name.split("/")[0]).datasheet is not None
    # What prefixes of one tree cost against a tree for each batch size, over the whole library.
    assert np.mean(losses) < 0.012
    assert np.mean(losses, axis=1).max() < 0.035
    assert np.max(losses) < 0.125


def test_weights_fit_the_devices(library):
    for device in library.devices():
        file = library.file(device)
        if file.datasheet is None:
            continue
        for entry in file.entries:
            pair = every_class()[entry.model_class.removesuffix(OFFLOADED)]
            weights = pair.target.weights_bytes(2) + pair.draft.weights_bytes(2)
            memory = file.datasheet.memory_gb * 1e9 * entry.tensor_parallel_size
            if entry.streamed is not None:
                assert weights > memory
                weights += entry.streamed.buffer_bytes - entry.streamed.bytes_per_pass
            assert (entry.streamed is not None) == entry.model_class.endswith(OFFLOADED)
            if entry.profile.source == "roofline":
                assert weights < memory


def test_found_in_a_checkout_and_when_installed(tmp_path, monkeypatch):
    root = shipped_directory()
    assert (root / "acceptance").is_dir()
    package = tmp_path / "site-packages" / "sequoia_vllm"
    shutil.copytree(root / "acceptance", package / "trees" / "acceptance")
    monkeypatch.setattr(library_module, "__file__", str(package / "tree" / "library.py"))
    assert shipped_directory() == package / "trees"
    shutil.rmtree(package / "trees")
    with pytest.raises(LibraryError, match="the tree library is missing"):
        shipped_directory()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h200/8b-1b/shiped",
         r"mean h200/8b-1b/shipped, b200/8b-1b/shipped, h200/70b-1b/shipped\? \(names"),
        ("h200", "no tree named 'h200'"),
        ("../../etc/passwd", "no tree named"),
        ("user/nothing", r"in the library \(names are .*: a100-40gb, a100-80gb, b200, "),
    ],
)  # fmt: skip
def test_unknown_names(library, name, message):
    with pytest.raises(LibraryError, match=message):
        library.entry(name)


PAIR = ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct")
H200 = PairKey("NVIDIA H200", *PAIR, "bfloat16")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100-80gb/8b-1b/shipped"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090/8b-1b/shipped"),
        ("AMD Instinct MI300X", "mi300x/8b-1b/shipped"),
    ],
)
def test_by_driver_name(library, device, name):
    selection = library.select(replace(H200, device=device))
    assert selection.entry.name == name
    assert selection.entry.tree == library.entry(name).tree
    assert selection.entry.profile.source == "roofline"
    assert selection.entry.estimates[0].speedup > 1
    assert "roofline, not measured" in selection.reason
    assert repr(device) in selection.reason


@pytest.mark.parametrize(
    ("target", "draft", "classes", "reason"),
    [
        ("Qwen/Qwen3-14B", "Qwen/Qwen3-0.6B", ["8b-0.6b"],
         "nearest to a target of 14b and a draft of 600m parameters"),
        ("some/target-65B", "some/draft-1.3B", ["70b-1b"], ""),
        ("/models/a", "/models/b", None, "sizes of /models/a and /models/b are unknown"),
        ("meta-llama/Llama-2-7b-hf", "JackFram/llama-68m", None,
         "made for meta-llama/Llama-2-7b-hf with JackFram/llama-68m"),
        ("a/t-72B", "a/d-7B", ["70b-8b"], ""),
        ("a/t-72B", "a/d", ["70b-1b", "70b-8b"], ""),
        ("a/t", "a/d-68m", ["7b-68m", "13b-68m"], ""),
        # A directory called after a size, or after a model, is neither.
        ("{folder}/meta-llama/Llama-2-7b-hf", "/models/tiny-68m", None, "are unknown"),
        ("/models/my-7B", "/models/tiny-68m", None, "are unknown"),
        *((f"{place}/my-7B", "/models/a-68m", None, "are unknown") for place in (".", "..", "~")),
    ],
)  # fmt: skip
def test_nearest_class_by_what_is_known(library, tmp_path, target, draft, classes, reason):
    (tmp_path / "meta-llama" / "Llama-2-7b-hf").mkdir(parents=True)
    found = library.select(replace(H200, target=target.format(folder=tmp_path), draft=draft))
    assert classes is None or found.entry.model_class in classes
    assert reason in found.reason


def test_acceptance_and_differences_from_how_it_was_made_are_said(library):
    weakest = library.select(H200)
    assert weakest.entry.acceptance_class == "shipped"
    assert "not measured: the weakest class, shipped" in weakest.reason
    pair = PairKey(
        H200.device, "meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct",
        "bfloat16",
    )  # fmt: skip
    assert library.select(pair).entry.name == "h200/70b-8b/appendix-e"
    reason = library.select(replace(H200, tensor_parallel_size=4, dtype="fp8")).reason
    assert "made for TP size 1, not 4" in reason
    assert "made for dtype bfloat16, not fp8" in reason


def test_of_vectors_of_the_pair_the_greedy_one_is_taken_and_of_others_the_weakest():
    """Which was published; if none was, of all."""
    every = {
        name: vector(name=name, source=source, acceptance=[first, 0.1], temperature=temperature)
        for name, source, first, temperature in (
            ("hot", "measured", 0.2, 0.6), ("greedy", "measured", 0.3, 0.0),
            ("strong", "published", 0.8, None), ("weak", "published", 0.7, None),
        )
    }  # fmt: skip
    for names, own, found in (
        ([*every], True, "greedy"), (["hot", "strong"], True, "strong"), ([*every], False, "weak"),
        (["greedy", "hot"], False, "hot"),
    ):  # fmt: skip
        chosen, why = choose_vector([every[name] for name in names], lambda *_, own=own: own)
        assert (chosen.name, why.endswith("on this pair" if own else found)) == (found, True)


def test_the_entry_for_as_many_devices_is_the_best(library):
    one = library.entry("h200/8b-1b/shipped")
    entries = [one.model_copy(update={"tensor_parallel_size": size}) for size in (1, 4)]
    shipped = AcceptanceFile.load(shipped_directory() / "acceptance" / "shipped.json")
    for devices, found in ((1, 0), (2, 0), (3, 1), (8, 1)):
        pair = replace(H200, tensor_parallel_size=devices)
        assert best_entry(entries, pair, shipped)[0] is entries[found]


def test_a_selection_is_said_in_one_line(library):
    entry = library.entry("h200/8b-1b/shipped")
    speed = f"expected {entry.estimates[0].speedup:.2f}x plain decoding at batch size 1"
    for tree, shape in (
        (TokenTree((-1,)), "no drafts for one request"), (TokenTree.chain(1), "1 drafts, depth 1")
    ):  # fmt: skip
        found = selection(entry.model_copy(update={"tree": tree}), ["why", "how"]).reason
        assert found == f"tree {entry.name}: {shape}, {speed} (roofline, not measured); why; how"


def test_measured_times_are_named_by_their_content():
    found = profile_reference(PAYS, "profile.json")
    contexts = [curve.context_length for curve in PAYS.target_forward]
    assert (found.file, found.context_length) == ("profile.json", min(contexts))
    assert re.fullmatch("[0-9a-f]{64}", found.sha256)
    assert found.sha256 != profile_reference(PAYS.model_copy(update={"device": "cpu"})).sha256


def test_computed_trees_are_no_larger_than_times_are_known_for(monkeypatch):
    place = "sequoia_vllm.library.selection."
    monkeypatch.setattr(f"{place}choose_schedule", lambda *_, max_size: max_size)
    monkeypatch.setattr(f"{place}largest_tree", lambda profile: 7)
    for source, most in (("measured", MOST_NODES), ("roofline", 7)):
        assert fastest_schedule(PAYS.model_copy(update={"source": source}), vector()) == most


def test_names_of_one_model_may_end_in_a_slash():
    assert is_same_model("a/b", "a/b/", {})
    assert is_same_model("a/b/", "a/b", {})
    assert not is_same_model("a/b", "a/bb", {})
    assert not is_same_model(None, "a/b", {})


def test_unknown_devices_get_the_nearest_with_one_log_line(library, caplog):
    with caplog.at_level(logging.INFO, logger="vllm.sequoia.library"):
        for _ in range(3):
            selection = library.select(replace(H200, device="NVIDIA RTX 6000 Ada Generation"))
    assert selection.entry.name.startswith("l40s/")
    assert "Ada Generation': l40s is the nearest by roofline" in selection.reason
    assert "operations per byte" in selection.reason
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage() == f"Sequoia: {selection.reason}"


def test_no_trees_for_a_kind_of_device(tmp_path):
    empty = TreeLibrary(tmp_path, tmp_path)
    with pytest.raises(LibraryError, match="no trees for 'NVIDIA H200': tune one"):
        empty.select(H200)
    (tmp_path / "acceptance").mkdir()
    shutil.copy(shipped_directory() / "h200.json", tmp_path / "h200.json")
    with pytest.raises(LibraryError, match="no trees for 'AMD EPYC 9654'"):
        TreeLibrary(tmp_path, tmp_path / "u").select(replace(H200, device="AMD EPYC 9654"))


def tuned_entry(library: TreeLibrary):
    return library.entry("h200/8b-1b/appendix-e").model_copy(
        update={"target": PAIR[0], "draft": PAIR[1]}
    )


def test_user_trees_come_first(library):
    path = library.save_user_tree(H200, tuned_entry(library))
    assert path.parent == library.user
    selection = library.select(H200)
    assert selection.entry.name == f"user/{path.stem}"
    assert f"tuned here ({path})" in selection.reason
    files = library.measurements(H200)
    assert files.directory == library.user / "measurements" / H200.file_name
    names = [path.relative_to(files.directory).as_posix() for path in files[1:]]
    assert names == ["acceptance.json", "profile.json"]
    assert library.entry(selection.entry.name).tree == selection.entry.tree
    assert library.entries()[0].name == selection.entry.name
    with pytest.raises(LibraryError, match="no tree named"):
        library.entry(f"h200/{path.stem}")
    path.write_text("{")
    with pytest.raises(LibraryError, match=r"user tree file .* is not JSON"):
        library.select(H200)


@pytest.mark.parametrize(
    "other",
    [
        {"device": "NVIDIA H100 PCIe"}, {"target": "other/model-8B"}, {"draft": "other/draft-1B"},
        {"dtype": "float16"}, {"tensor_parallel_size": 2},
    ],
)  # fmt: skip
def test_user_trees_are_for_exactly_their_key(library, other):
    library.save_user_tree(H200, tuned_entry(library))
    assert not library.select(replace(H200, **other)).entry.name.startswith("user/")


def test_user_tree_names():
    key = PairKey("NVIDIA H200", "meta-llama/Llama-3.1-8B", "/m/d/", "bfloat16", 2)
    name = key.file_name
    # Trees that users tuned with earlier versions are found.
    assert name == "nvidia-h200--meta-llama-llama-3.1-8b--m-d--bfloat16--tp2--ba08ef0c"
    assert name == replace(key, draft="/m/d").file_name
    assert replace(key, draft="/m/X").file_name != replace(key, draft="/m").file_name
    assert name != replace(key, target="meta-llama/llama-3.1-8b").file_name
    cut = replace(key, target="ab-" + "c" * 39).file_name  # a part has 40 characters at most
    assert f"--{'c' * 39}--m-d--" in cut
    long = PairKey("x" * 300, "/" * 9, "名", "bfloat16").file_name
    assert long == f"{'x' * 40}--x--x--bfloat16--tp1--163b4abf"


def test_wrong_inputs(tmp_path):
    inputs = tmp_path / "in"
    shutil.copytree(shipped_directory() / "acceptance", inputs / "acceptance")
    with pytest.raises(LibraryError, match="no acceptance vectors in"):
        generate_library(tmp_path / "nowhere")

    def refused(error, message: str) -> None:
        with pytest.raises(error, match=message):
            generate_library(inputs)

    profiles = inputs / "profiles"
    PAYS.model_copy(update={"device": "NVIDIA Z9000"}).save(profiles / "one.json")
    refused(LibraryError, "'NVIDIA Z9000' is not in the device table")
    for name in ("one.json", "two.json"):
        PAYS.model_copy(update={"device": "cpu"}).save(profiles / name)
    refused(LibraryError, r"two.json: profiles/one.json is already of x86-cpu")
    (profiles / "two.json").write_text("{}")
    refused(ProfileError, r"two.json")
    (profiles / "two.json").unlink()
    vector(name="named-so").save(inputs / "acceptance" / "other.json")
    refused(LibraryError, r"other.json is named 'named-so' inside")
    (inputs / "acceptance" / "other.json").write_text("[0.5]")
    refused(AcceptanceError, r"other.json must hold one JSON object")


def test_examples_in_the_readme_are_valid():
    text = (shipped_directory() / "README.md").read_text()
    acceptance, profile = (part.split("```")[0] for part in text.split("```json\n")[1:])
    assert AcceptanceFile.model_validate_json(acceptance).vector.probability(0) == 0.7
    assert Profile.model_validate_json(profile).target_forward[0].tokens == [1, 8, 64]
