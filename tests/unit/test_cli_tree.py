"""``sequoia-vllm tree``: output, files, errors."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sequoia_vllm import __version__
from sequoia_vllm.cli import app
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.tree_library import TreeLibrary, shipped_directory
from sequoia_vllm.tree import Acceptance, TokenTree, optimize_tree

VECTOR = [0.6, 0.2, 0.1]
SCRIPT = Path(sys.executable).parent / "sequoia-vllm"


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*arguments: object):
    return json.loads(run(*arguments, "--json").stdout)


def fails(*arguments: object) -> str:
    """The error message of a command that must end with exit code 2."""
    result = run(*arguments, code=2)
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


@pytest.fixture(autouse=True)
def wide_terminal_and_empty_user_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path / "user"))


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
    def test_json(self, vector):
        data = run_json("tree", "build", "--acceptance", vector, "--size", 16, "--max-depth", 4)
        best = optimize_tree(VECTOR, 16, 4)
        assert data["parents"] == list(best.parents)
        assert (data["size"], data["depth"]) == (16, best.depth)
        assert data["expected_tokens"] == pytest.approx(best.expected_tokens(Acceptance.of(VECTOR)))
        assert data["num_speculative_tokens"] == 15
        assert sum(data["nodes_per_level"]) == 16
        assert data["acceptance"] == VECTOR

    def test_output_is_a_tree_file(self, tree_file):
        assert TokenTree.load(tree_file) == optimize_tree(VECTOR, 16, 4)

    def test_says_when_the_limits_leave_no_room(self, vector):
        result = run("tree", "build", "--acceptance", vector, "--size", 99, "--max-depth", 1)
        assert "room for 4 of the 99 nodes" in result.stderr


class TestShow:
    def test_file(self, tree_file):
        output = run("tree", "show", tree_file).stdout
        assert "16 nodes with the root, depth 4" in output
        assert "└──" in output
        assert "0.6000" in output
        assert "with children" in output

    def test_library_name(self):
        output = run("tree", "show", "h200/8b-1b/shipped", "--nodes", 10).stdout
        assert "less valuable nodes (--nodes 63)" in output
        assert "by batch size (roofline, not measured)" in output

    def test_json(self, tree_file):
        data = run_json("tree", "show", tree_file)
        assert data["parents"] == list(TokenTree.load(tree_file).parents)
        assert data["values"][0] == 1
        entry = run_json("tree", "show", "h200/8b-1b/shipped")["entry"]
        assert entry["schedule"][0][0] == 1

    def test_without_a_vector(self, tmp_path):
        path = tmp_path / "bare.json"
        TokenTree.chain(3).save(path)
        result = run("tree", "show", path)
        assert "expected tokens" not in result.stdout
        assert "give --acceptance" in result.stderr
        assert "expected_tokens" not in run_json("tree", "show", path)

    def test_another_vector(self, tree_file, tmp_path):
        path = tmp_path / "other.json"
        path.write_text("[0.1]")
        data = run_json("tree", "show", tree_file, "--acceptance", path)
        assert data["expected_tokens"] == pytest.approx(1.1111)

    def test_user_tree(self):
        library = TreeLibrary()
        pair = PairKey("NVIDIA H200", "org/target", "org/draft", "bfloat16")
        path = library.save_user_tree(pair, library.entry("h200/8b-1b/shipped"))
        by_name = run_json("tree", "show", f"user/{path.stem}")
        by_file = run_json("tree", "show", path)
        assert by_name["parents"] == by_file["parents"]
        assert by_name["expected_tokens"] == by_file["expected_tokens"]


class TestPlot:
    def test_svg_of_a_file(self, tree_file, tmp_path):
        picture = tmp_path / "tree.svg"
        assert f"wrote {picture}" in run("tree", "plot", tree_file, "-o", picture).stdout
        first = picture.read_bytes()
        ET.fromstring(first)
        run("tree", "plot", tree_file, "-o", picture)
        assert picture.read_bytes() == first

    def test_root_only_and_without_values(self, tmp_path):
        path = tmp_path / "root.json"
        TokenTree((-1,)).save(path)
        run("tree", "plot", path, "-o", tmp_path / "root.png")
        assert (tmp_path / "root.png").is_file()


class TestLibraryCommands:
    def test_lines_are_not_broken_where_no_terminal_is(self, monkeypatch):
        monkeypatch.delenv("COLUMNS")
        lines = run("tree", "list", "--device", "NVIDIA H200").stdout.splitlines()
        names = [entry.name for entry in TreeLibrary().entries() if entry.name[:5] == "h200/"]
        assert [line.split()[0] for line in lines[1 : len(names) + 1]] == names
        assert lines[-1].startswith("devices: ")

    def test_vectors_of_the_library_by_name(self):
        words = ["--acceptance", "shipped"]
        assert run_json("tree", "build", *words, "--size", 8)["size"] == 8
        assert run_json("tree", "show", "h200/70b-1b/shipped", *words)["values"]

    def test_a_device_has_any_of_its_names(self):
        shown = run("tree", "show", "cpu/800m-1.67m/shipped").stdout
        assert shown.startswith("x86-cpu/800m-1.67m/shipped  6 nodes with the root, depth 4")

    def test_a_reader_may_stop(self):
        command = f"{SCRIPT} tree show h200/70b-1b/shipped --nodes 1000 | head -1"
        shell = ["bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")


class TestErrors:
    """Exit code 2, one message that names the fix, no traceback, nothing on stdout."""

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--size", 0, "size must be at least 1, not 0 (sizes count the root)"),
            ("--size", 100_000, "--size 100000: engines take trees of up to 1,024 nodes"),
            ("--size", "x", "Invalid value for '--size'"),
            ("--output", "/nowhere/at/all/t.json", "No such file or directory"),
        ],
    )
    def test_build(self, vector, option, value, message):
        arguments = ["tree", "build", "--acceptance", vector]
        if option != "--size":
            arguments += ["--size", 4]
        assert message in fails(*arguments, option, value)

    def test_trees(self, tmp_path, tree_file):
        assert "Is a directory" in fails("tree", "show", tmp_path)
        assert "No such file" in fails("tree", "show", tmp_path / "none.json")
        assert "cannot read tree file" in fails("tree", "show", "~/no-such-tree")
        assert "no tree named 'h100-sxm/x'" in fails("tree", "show", "h100/x")
        library_file = shipped_directory() / "h200.json"
        assert "is a library file with 18 trees" in fails("tree", "show", library_file)
        assert "draw at least 1" in fails("tree", "show", tree_file, "--nodes", 0)

    def test_plot(self, tree_file, tmp_path):
        assert "name a file ending in .svg" in fails("tree", "plot", tree_file, "-o", "t.bmp")
        assert "Missing argument 'FILE|NAME'" in fails("tree", "plot", "-o", tmp_path / "t.png")
        unwritable = fails("tree", "plot", tree_file, "-o", "/nowhere/at/all/t.png")
        assert "No such file or directory" in unwritable

    def test_devices(self):
        assert "no trees for device 'abacus'" in fails("tree", "list", "--device", "abacus")
        assert "device name is empty" in fails("tree", "list", "--device", "")

    def test_bugs_keep_their_traceback(self, monkeypatch, vector):
        def broken(*_: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr("sequoia_vllm.cli.tree.optimize_tree", broken)
        with pytest.raises(ValueError, match="a bug"):
            run("tree", "build", "--acceptance", vector, "--size", 4, code=1)


class TestCommand:
    def test_version(self):
        assert run("--version").stdout.strip() == f"sequoia-vllm {__version__}"

    def test_tree_commands_load_neither_torch_nor_vllm(self, tmp_path):
        code = (
            "import sys\n"
            "from sequoia_vllm.cli import main\n"
            "sys.argv = ['sequoia-vllm', 'tree', 'show', 'h200/8b-1b/shipped', '--json']\n"
            "try:\n"
            "    main()\n"
            "except SystemExit as end:\n"
            "    assert not end.code\n"
            "loaded = {'torch', 'vllm', 'matplotlib', 'transformers'} & set(sys.modules)\n"
            "assert not loaded, loaded\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["size"] == 63
