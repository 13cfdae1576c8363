"""Trees as users point at them; every kind of bad input has its own message with the fix."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sequoia_vllm import json_input
from sequoia_vllm.hardware.choose import choose_schedule, choose_tree
from sequoia_vllm.hardware.step_profile import Profile, ProfileError
from sequoia_vllm.library.files import AcceptanceFile, LibraryError
from sequoia_vllm.library.tree_library import (
    TreeLibrary,
    find_tree,
    find_vector,
    is_tree_file,
    shipped_directory,
)
from sequoia_vllm.tree import Acceptance, AcceptanceError, TokenTree, TreeError
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE
from sequoia_vllm.tree.token_tree import SCHEMA
from tests.unit.test_tune import vector

nan, inf = float("nan"), float("inf")


def refused(read: Callable, error: type[Exception], message: str, path: Path, data: object) -> None:
    """A file with these bytes, or this JSON: the error of its reader names it."""
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    with pytest.raises(error, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([], "non-empty"),
        ([[]], "non-empty"),
        ([[[0.1]]], r"got shape \(1, 1, 1\)"),
        (0.5, r"got shape \(\)"),
        ([0.1, nan], r"p\[1\] is not a finite number: nan"),
        ([inf], "not a finite number: inf"),
        ([0.5, -0.1], r"p\[1\] is negative: -0.1"),
        ([[0.5], [1.5]], r"p\[1\]\[0\] is more than 1: 1.5"),
        ([0.7, 0.6], "probabilities in p sum to 1.3"),
        ([[0.5, 0.1], [0.9, 0.2]], r"probabilities in p\[1\] sum to 1.1"),
        (
            [[0.5, 0.2], [0.4]],
            r"equally long lists p\[d\]\[k\], like \[\[0.6, 0.2\], \[0.5, 0.0\]\]: p\[0\] is of "
            r"the root's children, p\[1\] of theirs. p\[0\] has 2 numbers, and p\[1\] has 1: fill "
            "up with 0$",
        ),
        (["a", "b"], "list of numbers"),
        (None, "shape|number"),
        ({"p": [0.1]}, "list of numbers"),
    ],
)
def test_acceptance_vectors(vector, message):
    with pytest.raises(AcceptanceError, match=message):
        Acceptance.of(vector)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", 'has no "acceptance" key; it holds nothing'),
        ('{"p": [0.1], "q": 1}', 'no "acceptance" key; it holds p, q'),
        ('"0.5"', "holds no list"),
        ('{"acceptance": "x"}', "holds no list"),
        ("[0.9, NaN]", "is not JSON: NaN is no number"),
        ("[0.9, 1e999]", "not a finite number"),
        (f"[{'9' * 400}]", "list of numbers"),
        ("[" * 100_000, "is not JSON: it is nested too deeply"),
        ("[0.9, 0.9]", "sum to 1.8"),
        ("\xff", "is not JSON"),
    ],
)
def test_acceptance_files(tmp_path, text, message):
    content = text.encode("latin-1")
    refused(Acceptance.load, AcceptanceError, message, tmp_path / "a.json", content)


def test_large_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_input, "MOST_MIB", 0)
    refused(Acceptance.load, AcceptanceError, "more than 0 MiB", tmp_path / "a.json", [0.5])


def test_missing_files(tmp_path):
    for read, error, what in (
        (Acceptance.load, AcceptanceError, "acceptance"),
        (AcceptanceFile.load, AcceptanceError, "acceptance"),
        (TokenTree.load, TreeError, "tree"),
        (Profile.load, ProfileError, "profile"),
    ):
        with pytest.raises(error, match=f"cannot read {what} file .*No such file"):
            read(tmp_path / "none.json")
        with pytest.raises(error, match="Is a directory"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "parents is empty"),
        ((0,), "its parent must be -1, not 0"),
        ((-1, 1), r"node 1 has parent 1: .*\(0 to 0\)"),
        ((-1, 0, 5), r"node 2 has parent 5: .*\(0 to 1\)"),
        ((-1, 0, -1), "node 2 has parent -1"),
        ((-1, "0"), "node 1 has parent '0': a parent is a node number"),
        ((-1, 0.0), "node 1 has parent 0.0: a parent is a node number"),
        ((-1, True), "node 1 has parent True"),
        ((-1, None), "node 1 has parent None"),
    ],
)
def test_trees(parents, message):
    with pytest.raises(TreeError, match=message):
        TokenTree(parents)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "one JSON object, not a list"),
        (None, "one JSON object, not nothing"),
        ({"schema": None, "parents": [-1]}, '"schema" is None'),
        ({"parents": [-1] + [0] * 1024}, "the tree has 1025 nodes: engines take at most 1,024"),
        ({"parents": [-1, 10**300]}, "node 1 has parent a number of very many digits"),
        ({"schema": "sequoia-vllm/token-tree/v9", "parents": [-1]}, "this version reads"),
        ({"schema": SCHEMA}, '"parents" must be a list of node numbers, not nothing'),
        ({"schema": SCHEMA, "parents": {"0": -1}}, "not an object"),
        ({"schema": SCHEMA, "parents": [-1, 0], "size": 3}, '"size" says 3 but'),
        ({"schema": SCHEMA, "parents": [-1, 0], "depth": 2}, '"depth" says 2 but'),
        ({"schema": SCHEMA, "parents": [-1, 2]}, "node 1 has parent 2"),
    ],
)
def test_tree_files(tmp_path, data, message):
    refused(TokenTree.load, TreeError, message, tmp_path / "tree.json", data)


def test_trimming_the_root_away():
    with pytest.raises(TreeError, match="the root always stays"):
        TokenTree.chain(2).trim(0)


CURVE = {"batch_size": 1, "context_length": 64, "tokens": [1, 8], "seconds": [0.01, 0.02]}
GOOD_PROFILE = {
    "schema": "sequoia-vllm/profile/v1", "source": "measured", "date": "2026-01-31",
    "device": "NVIDIA H200", "target": "t", "draft": "d",
    "target_parameters": 7e9, "draft_parameters": 7e7,
    "target_forward": [CURVE], "draft_level": [CURVE],
    "overhead": [{"batch_size": 1, "plain_seconds": 0.0, "tree_seconds": 0.001}],
}  # fmt: skip


def curve(**changes: object) -> dict:
    return {"target_forward": [{**CURVE, **changes}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "x"}, "\"schema\" is 'x'; this version reads"),
        ({"schema": None}, '"schema" is None'),
        ({"source": "roofline"}, "must carry the datasheet values"),
        ({"target": ...}, "target: Field required"),
        (curve(tokens=[8, 1]), "tokens must increase"),
        (curve(tokens=[1, 1]), "tokens must increase"),
        (curve(tokens=[2, 8]), "must start at 1 token"),
        (curve(seconds=[0.01]), "seconds has 1 values for 2 token counts"),
        (curve(seconds=[-1, 0.02]), "seconds.0: .*greater than 0.*got -1"),
        (curve(seconds=[nan, 0.02]), "is not JSON: NaN is no number"),
        (curve(spread=[0.1]), "spread has 1 values"),
        ({"target_forward": [CURVE] * 2}, "two curves for the same"),
        ({"overhead": GOOD_PROFILE["overhead"] * 2}, "overhead has two entries"),
    ],
)
def test_profiles(tmp_path, change, message):
    """A change to the good one; ...: without this field."""
    data = {key: value for key, value in {**GOOD_PROFILE, **change}.items() if value is not ...}
    refused(Profile.load, ProfileError, message, tmp_path / "profile.json", data)


def test_the_good_profile_is_good(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(GOOD_PROFILE))
    profile = Profile.load(path)
    profile.save(path)
    assert Profile.load(path) == profile


@pytest.mark.parametrize(
    ("choose", "vector", "options", "error", "message"),
    [
        (choose_tree, [0.5], {"batch_size": 0}, ProfileError, "batch size 0"),
        (choose_schedule, [0.5], {"batch_sizes": []}, ProfileError, "no batch sizes"),
        (choose_schedule, [0.5], {"batch_sizes": [1, -2]}, ProfileError, "batch size -2"),
        (choose_tree, [0.5], {"max_size": 0}, TreeError, "max_size must be at least 1"),
        (choose_tree, [0.6, 0.6], {}, AcceptanceError, r"sum to 1\.2"),
    ],
)
def test_requests_of_the_cost_model(choose, vector, options, error, message):
    with pytest.raises(error, match=message):
        choose(vector, Profile.model_validate(GOOD_PROFILE), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acceptance": []}, "acceptance: .*non-empty"),
        ({"acceptance": [0.9, 0.9]}, "acceptance: .*sum to 1.8"),
        ({"acceptance": [[0.5], [0.1, 0.2]]}, "acceptance: .*equally long"),
        ({"trials": [3]}, "trials must have the shape of acceptance"),
        ({"target": None}, "must name its target and its draft"),
        ({"name": "My Vector!"}, "name: String should match"),
        ({"surprise": 1}, "surprise: Extra inputs"),
        ({"schema": None}, '"schema" is None'),
    ],
)
def test_measured_acceptance_files(tmp_path, change, message):
    data = {**vector().to_dict(), **change}
    refused(AcceptanceFile.load, AcceptanceError, message, tmp_path / "mine.json", data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: b"{", "is not JSON"),
        (lambda file: [], "must hold one JSON object"),
        (lambda file: file | {"schema": "v0"}, "\"schema\" is 'v0'"),
        (lambda file: file | {"device": "h100"}, "does not belong to device h100"),
        (lambda file: file | {"entries": file["entries"][:1] * 2}, "two entries are named"),
        (lambda file: entry(file, tree={"size": 9}), "tree: .*"),
        (lambda file: parents(file, [-1, 3]), "node 1 has parent 3"),
        (lambda file: parents(file, [-1, 0, 0]), '"size" says'),
        (lambda file: entry(file, schedule=[[2, 9, 1]]), "no range has batch size 1, before"),
        (lambda file: entry(file, schedule=[[1, 4, 1], [6, 9, 0]]), "has batch size 5, before"),
        (lambda file: entry(file, schedule=[[1, 9, 999]]), "999 drafts from a tree of"),
        (lambda file: entry(file, acceptance=[0.8, 0.8]), "sum to 1.6"),
    ],
)
def test_library_files(tmp_path, change, message):
    data = change(json.loads((shipped_directory() / "h200.json").read_text()))
    library = TreeLibrary(tmp_path, tmp_path / "user")
    refused(lambda _: library.file("h200"), LibraryError, message, tmp_path / "h200.json", data)


def entry(file: dict, **changes: object) -> dict:
    first = file["entries"][0]
    for key, value in changes.items():
        first[key] = {**first[key], **value} if isinstance(value, dict) else value
    return file


def parents(file: dict, nodes: list[int]) -> dict:
    return entry(file, tree={"parents": nodes})


TREE = TokenTree((-1, 0, 0, 1))


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("reference", ["mine", "./mine", "~/mine", "{home}/mine"])
def test_a_file_may_have_any_name(home, reference):
    (home / "mine").write_text(json.dumps({"parents": [-1, 0, 0, 1], "acceptance": [0.5]}))
    found = find_tree(reference.format(home=home))
    assert found.tree == TREE
    assert found.acceptance == Acceptance.of([0.5])
    assert found.entry is None


def test_a_file_needs_only_parents_and_no_wrong_acceptance(home):
    (home / "tree.json").write_text(json.dumps({"parents": [-1, 0, 0, 1]}))
    assert find_tree("tree.json").tree == TREE
    (home / "tree.json").write_text(json.dumps({"parents": [-1, 0], "acceptance": [2]}))
    with pytest.raises(AcceptanceError, match=r"tree file tree\.json: p\[0\] is more"):
        find_tree("tree.json")


@pytest.mark.parametrize("reference", ["folder", "./folder", "~/folder"])
def test_directories_are_named_as_such(home, reference):
    (home / "folder").mkdir()
    with pytest.raises(TreeError, match=r"(is|Is) a directory"):
        find_tree(reference)


def test_names_are_looked_up_where_a_directory_has_the_same(home):
    (home / "h200" / "70b-1b" / "shipped").mkdir(parents=True)
    found = find_tree("h200/70b-1b/shipped")
    assert found.entry is not None
    assert found.title == "h200/70b-1b/shipped"


LONG = "x" * 5000


@pytest.mark.parametrize("reference", ["no/such", "", "x\0y", "~", LONG, f"user/{LONG}"])
def test_what_is_neither_is_an_error_of_ours(reference):
    with pytest.raises((LibraryError, TreeError)):
        find_tree(reference)


def test_vectors_by_name_and_by_file(home):
    (home / "mine").write_text("[0.5, 0.25]")
    assert find_vector("mine") == find_vector("~/mine") == Acceptance.of([0.5, 0.25])
    assert find_vector("shipped") == REFERENCE_ACCEPTANCE
    with pytest.raises(AcceptanceError, match="no acceptance vector 'shiped': name a file, or one"):
        find_vector("shiped")
    assert all(map(is_tree_file, ["x.json", "/x", "~/x", "./x", "../x"]))
    assert not is_tree_file("h200/70b-1b/shipped")
