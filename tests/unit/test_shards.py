"""CI goes round the shards: every test that it leaves out is in one of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import shards

ROOT = Path(__file__).parents[2]
FILES = [file.relative_to(ROOT) for file in sorted((ROOT / "tests").rglob("test_*.py"))]


def marked() -> list[Path]:
    """Files with tests that CI leaves out, of which only shards may run some."""
    own = Path(__file__).relative_to(ROOT)
    words = ("mark.sharded", "chessboard(")
    return [f for f in FILES if f != own and any(w in (ROOT / f).read_text("utf-8") for w in words)]


def test_each_file_is_in_one_shard():
    assert len(marked()) > 30
    for file in marked():
        taken = [s for s in shards.SHARDS if any(file.is_relative_to(name) for name in s.files)]
        assert len(taken) == 1, f"{file} is in {len(taken)} shards (tests/shards.py)"
    for file in FILES:
        if file.parent.name == "gpu_rehearsal":
            taken = [s for s in shards.SHARDS if str(file) in s.rehearsed]
            assert len(taken) == 1, f"{file} is rehearsed in {len(taken)} shards (tests/shards.py)"


def test_shards_name_what_exists():
    named = {name for shard in shards.SHARDS for name in (*shard.files, *shard.rehearsed)}
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_part_runs_and_one_that_fails_fails_the_shard(monkeypatch, capfd):
    parts = [("tests.no_such_module",), ("platform",)]
    monkeypatch.setattr(shards, "SHARDS", (shards.Shard(), shards.Shard(modules=tuple(parts))))
    monkeypatch.setattr(shards, "commits", lambda: 7)
    monkeypatch.setattr(sys, "argv", ["shards", "next"])
    assert shards.main() == 1
    said = capfd.readouterr()
    assert "Shard 1 of 0 to 1" in said.out
    assert "-m platform" in said.out
    assert "no_such_module" in said.err
    monkeypatch.setattr(sys, "argv", ["shards", "0"])
    assert shards.main() == 0


@pytest.mark.parametrize("number", ["2000", "-1", "one"])
def test_a_number_that_is_no_shard_is_refused(number):
    command = [sys.executable, "-m", "tests.shards", number]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"There are shards 0 to {len(shards.SHARDS) - 1}." in done.stderr


SKIPPING = """
import pytest

def test_for_a_reason_of_its_own():
    pytest.skip("too slow today")

def test_without_a_gpu():
    pytest.skip("needs a CUDA device")
"""


@pytest.mark.parametrize(("setting", "failed"), [("true", 1), ("", 0)])
def test_ci_refuses_skips_for_reasons_of_their_own(tmp_path, monkeypatch, setting, failed):
    """The hooks are those of `tests/conftest.py`."""
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    monkeypatch.setenv("CI", setting)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == failed, done.stdout + done.stderr
    assert f"{2 - failed} skipped" in done.stdout
    assert ("too slow today (see MAY_SKIP" in done.stdout) == bool(failed)
