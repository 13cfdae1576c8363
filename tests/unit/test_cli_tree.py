"""``sequoia-vllm tree``: output, files, errors."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from sequoia_vllm import __version__
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.tree_library import shipped_directory
from sequoia_vllm.tree import Acceptance, TokenTree, optimize_tree
from tests.support.commands import command as run
from tests.support.commands import in_words, python

VECTOR = [0.6, 0.2, 0.1]
SCRIPT = Path(sys.executable).parent / "sequoia-vllm"


def run_json(*arguments: object):
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture(autouse=True)
def wide_terminal_and_no_own_trees(monkeypatch, library):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def vector(tmp_path):
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps(VECTOR))
    return path


@pytest.fixture
def tree_file(vector, tmp_path):
    path = tmp_path / "tree.json"
    run("tree", "build", "--acceptance", vector, "--size", 16, "--max-depth", 4, "--output", path)
    return path


class TestBuild:
    def test_json_and_file(self, vector, tree_file):
        data = run_json("tree", "build", "--acceptance", vector, "--size", 16, "--max-depth", 4)
        best = optimize_tree(VECTOR, 16, 4)
        assert TokenTree.load(tree_file) == best
        assert data["parents"] == list(best.parents)
        assert (data["size"], data["depth"]) == (16, best.depth)
        assert data["expected_tokens"] == pytest.approx(best.expected_tokens(Acceptance.of(VECTOR)))
        assert data["num_speculative_tokens"] == 15
        assert sum(data["nodes_per_level"]) == 16
        assert data["acceptance"] == VECTOR

    def test_says_when_the_limits_leave_no_room(self, vector):
        result = run("tree", "build", "--acceptance", vector, "--size", 99, "--max-depth", 1)
        assert "room for 4 of the 99 nodes" in result.stderr


class TestShow:
    def test_texts(self, tree_file):
        output = run("tree", "show", tree_file).stdout
        for said in ("16 nodes with the root, depth 4", "└──", "0.6000", "with children"):
            assert said in output
        output = run("tree", "show", "h200/8b-1b/shipped", "--nodes", 10).stdout
        assert "less valuable nodes (--nodes 63)" in output
        assert "by batch size (roofline, not measured)" in output

    def test_json_with_any_vector(self, tree_file, tmp_path):
        data = run_json("tree", "show", tree_file)
        assert data["parents"] == list(TokenTree.load(tree_file).parents)
        assert data["values"][0] == 1
        entry = run_json("tree", "show", "h200/8b-1b/shipped")["entry"]
        assert entry["schedule"][0][0] == 1
        path = tmp_path / "other.json"
        path.write_text("[0.1]")
        data = run_json("tree", "show", tree_file, "--acceptance", path)
        assert data["expected_tokens"] == pytest.approx(1.1111)

    def test_without_a_vector(self, tmp_path):
        path = tmp_path / "bare.json"
        TokenTree.chain(3).save(path)
        result = run("tree", "show", path)
        assert "expected tokens" not in result.stdout
        assert "give --acceptance" in result.stderr
        assert "expected_tokens" not in run_json("tree", "show", path)

    def test_user_tree(self, library):
        pair = PairKey("NVIDIA H200", "org/target", "org/draft", "bfloat16")
        path = library.save_user_tree(pair, library.entry("h200/8b-1b/shipped"))
        by_name, by_file = (run_json("tree", "show", x) for x in (f"user/{path.stem}", path))
        for name in ("parents", "expected_tokens"):
            assert by_name[name] == by_file[name]


class TestPlot:
    def test_svg_of_a_file(self, tree_file, tmp_path):
        picture = tmp_path / "tree.svg"
        assert f"wrote {picture}" in run("tree", "plot", tree_file, "-o", picture).stdout
        first = picture.read_bytes()
        ET.fromstring(first)
        run("tree", "plot", tree_file, "-o", picture)
        assert picture.read_bytes() == first
        path = tmp_path / "root.json"
        TokenTree((-1,)).save(path)  # the root alone, and no values
        run("tree", "plot", path, "-o", tmp_path / "root.png")
        assert (tmp_path / "root.png").is_file()


class TestLibraryCommands:
    def test_lines_are_not_broken_where_no_terminal_is(self, monkeypatch, library):
        monkeypatch.delenv("COLUMNS")
        lines = run("tree", "list", "--device", "NVIDIA H200").stdout.splitlines()
        names = [entry.name for entry in library.entries() if entry.name[:5] == "h200/"]
        assert [line.split()[0] for line in lines[1 : len(names) + 1]] == names
        assert lines[-1].startswith("devices: ")

    def test_vectors_and_devices_by_name(self):
        words = ["--acceptance", "shipped"]
        assert run_json("tree", "build", *words, "--size", 8)["size"] == 8
        assert run_json("tree", "show", "h200/70b-1b/shipped", *words)["values"]
        shown = run("tree", "show", "cpu/800m-1.67m/shipped").stdout
        assert shown.startswith("x86-cpu/800m-1.67m/shipped  6 nodes with the root, depth 4")

    def test_a_reader_may_stop(self):
        command = f"{SCRIPT} tree show h200/70b-1b/shipped --nodes 1000 | head -1"
        shell = ["bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")


class TestErrors:
    """Exit code 2, one message that names the fix, no traceback, nothing on stdout."""

    def test_each_names_the_fix(self, tmp_path, tree_file, vector):
        build, nowhere = ["build", "--acceptance", vector], "/nowhere/at/all/t.png"
        library_file = shipped_directory() / "h200.json"
        for words, said in [
            ([*build, "--size", 0], "size must be at least 1, not 0 (sizes count the root)"),
            ([*build, "--size", 100_000], "--size 100000: engines take trees of up to 1,024 nodes"),
            ([*build, "--size", "x"], "Invalid value for '--size'"),
            ([*build, "--size", 4, "--output", nowhere], "No such file or directory"),
            (["show", tmp_path], "Is a directory"),
            (["show", tmp_path / "none.json"], "No such file"),
            (["show", "~/no-such-tree"], "cannot read tree file"),
            (["show", "h100/x"], "no tree named 'h100-sxm/x'"),
            (["show", library_file], "is a library file with 18 trees"),
            (["show", tree_file, "--nodes", 0], "draw at least 1"),
            (["plot", tree_file, "-o", "t.bmp"], "name a file ending in .svg"),
            (["plot", "-o", tmp_path / "t.png"], "Missing argument 'FILE|NAME'"),
            (["plot", tree_file, "-o", nowhere], "No such file or directory"),
            (["list", "--device", "abacus"], "no trees for device 'abacus'"),
            (["list", "--device", ""], "device name is empty"),
        ]:
            result = run("tree", *words, code=2)
            assert (result.stdout, said in in_words(result.stderr)) == ("", True), words

    def test_bugs_keep_their_traceback(self, monkeypatch, vector):
        def broken(*_: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr("sequoia_vllm.cli.tree.optimize_tree", broken)
        with pytest.raises(ValueError, match="a bug"):
            run("tree", "build", "--acceptance", vector, "--size", 4, code=1)


def test_version():
    assert run("--version").stdout.strip() == f"sequoia-vllm {__version__}"


LOADED = """
import sys
from sequoia_vllm.cli import main
sys.argv = ['sequoia-vllm', 'tree', 'show', 'h200/8b-1b/shipped', '--json']
try:
    main()
except SystemExit as end:
    assert not end.code
loaded = {'torch', 'vllm', 'matplotlib', 'transformers'} & set(sys.modules)
assert not loaded, loaded
"""


def test_tree_commands_load_neither_torch_nor_vllm():
    assert json.loads(python(LOADED).stdout)["size"] == 63
