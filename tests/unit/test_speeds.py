"""Measured speeds in benchmarks/speeds: the documents say them, and they are drawn."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from benchmarks import speed_picture

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "speeds" / "h100.json"
MEASURED = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", MEASURED["speeds"], ids=str)
def test_the_table_is_what_was_measured(row):
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").replace("**", "")
    how = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']}"
    [line] = [x for x in text.splitlines() if x.startswith(f"| {how}, batch {row['requests']} |")]
    for rounds in row["rounds"]:
        assert f"| {', '.join(map(str, rounds))}" in line


def test_ratios_in_the_readme_are_of_what_was_measured():
    """Speeds in the file are rounded; the ratios are of what they were before."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("**", "")
    said = [tuple(map(float, pair)) for pair in re.findall(r"(\d\.\d\d)x, (\d\.\d\d)x", text)]
    for row in MEASURED["speeds"][:3]:
        plain, *others = row["rounds"]
        for rounds in others:
            ratios = tuple(a / b for a, b in zip(rounds, plain, strict=True))
            assert any(pair == pytest.approx(ratios, abs=0.011) for pair in said), ratios


def test_it_is_drawn(monkeypatch, tmp_path):
    picture = tmp_path / "h100.svg"
    monkeypatch.setattr(sys, "argv", ["speed_picture", str(FILE), str(picture)])
    speed_picture.main()
    drawn = picture.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in drawn for name in MEASURED["methods"])


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
