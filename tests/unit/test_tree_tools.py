"""Developers' tools about trees and their predicted times: `python -m benchmarks...`."""

import typer
from typer.testing import CliRunner

from benchmarks.generate_trees import generate
from sequoia_vllm.library.tree_library import shipped_directory


def run(tool, *arguments: object, code: int = 0):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(tool)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


class TestGenerate:
    def test_brings_a_directory_up_to_date(self, tmp_path, monkeypatch):
        files = {path.name: path.read_text() for path in shipped_directory().glob("l4*.json")}
        monkeypatch.setattr(
            "benchmarks.generate_trees.generate_library", lambda inputs, report: dict(files)
        )
        output = tmp_path / "out"
        stale = run(generate, "--output", output, "--check", code=1)
        assert "would change l4.json" in stale.stdout
        assert not output.exists()
        assert "3 changed" in run(generate, "--output", output).stdout
        run(generate, "--output", output, "--check")
        # A file that is no library file belongs to somebody else.
        (output / "mine.json").write_text("{}")
        (output / "old.json").write_text(files["l4.json"])
        stale = run(generate, "--output", output, "--check", code=1)
        assert "would remove old.json" in stale.stdout
        assert "0 changed, 1 removed" in run(generate, "--output", output).stdout
        assert sorted(path.name for path in output.glob("*")) == sorted([*files, "mine.json"])

    def test_without_inputs(self, tmp_path):
        message = "no acceptance vectors in"
        assert message in run(generate, "--inputs", tmp_path, code=2).stderr
