"""matplotlib is an extra: what would be drawn without it is refused before anything is measured."""

import sys

import pytest
from typer.testing import CliRunner

from sequoia_vllm.cli import app
from tests.support.models import DRAFT, TARGET

PAIR = ["--model", TARGET, "--draft-model", DRAFT]


@pytest.mark.parametrize(
    "command",
    [
        ["tree", "plot", "h200/70b-1b/shipped", "--output", "tree.svg"],
        ["bench", *PAIR, "--plot", "speeds.svg"],
    ],
    ids=lambda command: command[0],
)
def test_pictures_without_matplotlib(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "pip install matplotlib" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []
