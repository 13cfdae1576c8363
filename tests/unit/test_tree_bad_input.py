"""Every kind of bad input has its own message, which says what to mend."""

import json

import pytest

from sequoia_vllm import json_input
from sequoia_vllm.hardware.choose import choose_schedule, choose_tree
from sequoia_vllm.hardware.step_profile import Profile, ProfileError
from sequoia_vllm.library.files import AcceptanceFile, LibraryError
from sequoia_vllm.library.tree_library import TreeLibrary, shipped_directory
from sequoia_vllm.tree import Acceptance, AcceptanceError, TokenTree, TreeError
from sequoia_vllm.tree.token_tree import SCHEMA

nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([], "non-empty list"),
        ([[]], "non-empty list"),
        ([[[0.1]]], r"got shape \(1, 1, 1\)"),
        (0.5, r"got shape \(\)"),
        ([0.1, nan], "p of child 1 at depth 0 is not a finite number: nan"),
        ([inf], "not a finite number: inf"),
        ([0.5, -0.1], "p of child 1 at depth 0 is negative: -0.1"),
        ([[0.5], [1.5]], "p of child 0 at depth 1 is more than 1: 1.5"),
        ([0.7, 0.6], "probabilities at depth 0 sum to 1.3"),
        ([[0.5, 0.1], [0.9, 0.2]], "probabilities at depth 1 sum to 1.1"),
        ([[0.5, 0.2], [0.4]], "equally long"),
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
        ("", "is not JSON"),
        ("{}", 'has no "acceptance" key; it holds nothing'),
        ('{"p": [0.1], "q": 1}', 'no "acceptance" key; it holds p, q'),
        ('"0.5"', "holds no list"),
        ("3", "holds no list"),
        ('{"acceptance": "x"}', "holds no list"),
        ("[0.9, NaN]", "is not JSON: NaN is no number"),
        ("[0.9, Infinity]", "is not JSON: Infinity is no number"),
        ("[0.9, 1e999]", "not a finite number"),
        (f"[{'9' * 400}]", "list of numbers"),
        ("[" * 100_000, "is not JSON: it is nested too deeply"),
        ("[0.9, 0.9]", "sum to 1.8"),
        ("\xff", "is not JSON"),
    ],
)
def test_acceptance_files(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(AcceptanceError, match=message) as caught:
        Acceptance.load(path)
    assert str(path) in str(caught.value)


def test_large_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_input, "MOST_MIB", 0)
    path = tmp_path / "a.json"
    path.write_text("[0.5]")
    with pytest.raises(AcceptanceError, match="more than 0 MiB"):
        Acceptance.load(path)


def test_missing_files(tmp_path):
    for read, error in (
        (Acceptance.load, AcceptanceError),
        (AcceptanceFile.load, AcceptanceError),
        (TokenTree.load, TreeError),
        (Profile.load, ProfileError),
    ):
        with pytest.raises(error, match="No such file"):
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
        ({}, '"parents" must be a list of node numbers, not nothing'),
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
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TreeError, match=message) as caught:
        TokenTree.load(path)
    assert str(path) in str(caught.value)


def test_trimming_the_root_away():
    with pytest.raises(TreeError, match="the root always stays"):
        TokenTree.chain(2).trim(0)


def good_profile() -> dict:
    curve = {"batch_size": 1, "context_length": 64, "tokens": [1, 8], "seconds": [0.01, 0.02]}
    return {
        "schema": "sequoia-vllm/profile/v1", "source": "measured", "date": "2026-01-31",
        "device": "NVIDIA H200", "target": "t", "draft": "d",
        "target_parameters": 7e9, "draft_parameters": 7e7,
        "target_forward": [curve], "draft_level": [dict(curve)],
        "overhead": [{"batch_size": 1, "plain_seconds": 0.0, "tree_seconds": 0.001}],
    }  # fmt: skip


def changed(path: str, value: object) -> dict:
    data = json.loads(json.dumps(good_profile()))
    *parents, last = path.split(".")
    place = data
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    if value is ...:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return data


PROFILES = [
    (changed("schema", "x"), "\"schema\" is 'x'; this version reads"),
    (changed("schema", ...), '"schema" is None'),
    (changed("source", "roofline"), "must carry the datasheet values"),
    (changed("target", ...), "target: Field required"),
    (changed("target_forward.0.tokens", [8, 1]), "tokens must increase"),
    (changed("target_forward.0.tokens", [1, 1]), "tokens must increase"),
    (changed("target_forward.0.tokens", [2, 8]), "must start at 1 token"),
    (changed("target_forward.0.seconds", [0.01]), "seconds has 1 values for 2 token counts"),
    (changed("target_forward.0.seconds.0", -1), "seconds.0: .*greater than 0.*got -1"),
    (changed("target_forward.0.seconds.0", nan), "is not JSON: NaN is no number"),
    (changed("target_forward.0.spread", [0.1]), "spread has 1 values"),
    (changed("target_forward", good_profile()["target_forward"] * 2), "two curves for the same"),
    (changed("overhead", good_profile()["overhead"] * 2), "overhead has two entries"),
    ([1, 2], "must hold one JSON object"),
]


@pytest.mark.parametrize(("data", "message"), PROFILES)
def test_profiles(tmp_path, data, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)


def test_the_good_profile_is_good(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(good_profile()))
    profile = Profile.load(path)
    profile.save(path)
    assert Profile.load(path) == profile


def test_requests_of_the_cost_model():
    profile = Profile.model_validate(good_profile())
    with pytest.raises(ProfileError, match="batch size 0"):
        choose_tree([0.5], profile, batch_size=0)
    with pytest.raises(ProfileError, match="no batch sizes"):
        choose_schedule([0.5], profile, batch_sizes=[])
    with pytest.raises(ProfileError, match="batch size -2"):
        choose_schedule([0.5], profile, batch_sizes=[1, -2])
    with pytest.raises(TreeError, match="max_size must be at least 1"):
        choose_tree([0.5], profile, max_size=0)
    with pytest.raises(AcceptanceError, match=r"sum to 1\.2"):
        choose_tree([0.6, 0.6], profile)


def good_acceptance_file() -> dict:
    return {
        "schema": "sequoia-vllm/acceptance/v1", "name": "mine", "description": "x",
        "source": "measured", "date": "2026-01-31", "target": "t", "draft": "d",
        "acceptance": [0.6, 0.2],
    }  # fmt: skip


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
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**good_acceptance_file(), **change}))
    with pytest.raises(AcceptanceError, match=message):
        AcceptanceFile.load(path)


def library_with(tmp_path, text: str) -> TreeLibrary:
    (tmp_path / "h200.json").write_text(text)
    return TreeLibrary(tmp_path, tmp_path / "user")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: "{", "is not JSON"),
        (lambda file: "[]", "must hold one JSON object"),
        (lambda file: file | {"schema": "v0"}, "\"schema\" is 'v0'"),
        (lambda file: file | {"device": "h100"}, "does not belong to device h100"),
        (lambda file: file | {"entries": file["entries"][:1] * 2}, "two entries are named"),
        (lambda file: entry(file, tree={"size": 9}), "tree: .*"),
        (lambda file: parents(file, [-1, 3]), "node 1 has parent 3"),
        (lambda file: parents(file, [-1, 0, 0]), '"size" says'),
        (lambda file: entry(file, schedule=[[2, 9, 1]]), r"\[2, 9\] should start at 1"),
        (lambda file: entry(file, schedule=[[1, 4, 1], [6, 9, 0]]), "should start at 5"),
        (lambda file: entry(file, schedule=[[1, 9, 999]]), "999 drafts from a tree of"),
        (lambda file: entry(file, acceptance=[0.8, 0.8]), "sum to 1.6"),
    ],
)
def test_library_files(tmp_path, change, message):
    data = change(json.loads((shipped_directory() / "h200.json").read_text()))
    library = library_with(tmp_path, data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(LibraryError, match=message) as caught:
        library.file("h200")
    assert "h200.json" in str(caught.value)


def entry(file: dict, **changes: object) -> dict:
    first = file["entries"][0]
    for key, value in changes.items():
        first[key] = {**first[key], **value} if isinstance(value, dict) else value
    return file


def parents(file: dict, nodes: list[int]) -> dict:
    return entry(file, tree={"parents": nodes})
