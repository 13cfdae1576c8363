"""Trees as users point at them: files of every kind, and names."""

import json

import pytest

from sequoia_vllm.library.files import LibraryError
from sequoia_vllm.library.tree_library import find_tree, find_vector, is_tree_file
from sequoia_vllm.tree import Acceptance, AcceptanceError, TokenTree, TreeError
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE

TREE = TokenTree((-1, 0, 0, 1))


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_needs_only_parents(home):
    (home / "tree.json").write_text(json.dumps({"parents": [-1, 0, 0, 1]}))
    assert find_tree("tree.json").tree == TREE


@pytest.mark.parametrize("reference", ["mine", "./mine", "~/mine", "{home}/mine"])
def test_a_file_may_have_any_name(home, reference):
    (home / "mine").write_text(json.dumps({"parents": [-1, 0, 0, 1], "acceptance": [0.5]}))
    found = find_tree(reference.format(home=home))
    assert found.tree == TREE
    assert found.acceptance == Acceptance.of([0.5])
    assert found.entry is None


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


def test_a_wrong_acceptance_beside_a_tree_names_the_file(home):
    (home / "tree.json").write_text(json.dumps({"parents": [-1, 0], "acceptance": [2]}))
    with pytest.raises(AcceptanceError, match=r"tree file tree\.json: p of child 0"):
        find_tree("tree.json")


def test_vectors_by_name_and_by_file(home):
    (home / "mine").write_text("[0.5, 0.25]")
    assert find_vector("mine") == find_vector("~/mine") == Acceptance.of([0.5, 0.25])
    assert find_vector("shipped") == REFERENCE_ACCEPTANCE
    with pytest.raises(AcceptanceError, match="no acceptance vector 'shiped': name a file, or one"):
        find_vector("shiped")


def test_paths_look_like_paths():
    assert all(map(is_tree_file, ["x.json", "/x", "~/x", "./x", "../x"]))
    assert not is_tree_file("h200/70b-1b/shipped")
