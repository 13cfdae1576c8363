"""Measured speeds in benchmarks/speeds: the documents say them, and they are drawn."""

import json
import sys
import tomllib
from pathlib import Path
from statistics import median

import pytest
import yaml

from benchmarks import speed_picture

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "speeds" / "h100.json"
MEASURED = json.loads(FILE.read_text(encoding="utf-8"))


def said_speed(ratios):
    """As tables say it: the median, and the range of rounds."""
    return f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
@pytest.mark.parametrize("row", MEASURED["speeds"], ids=str)
def test_tables_are_what_was_measured(page, row):
    text = (ROOT / page).read_text(encoding="utf-8").replace("**", "")
    for ratios in speed_picture.speedups(row)[1:]:
        if page == "docs/benchmarks.md" or ratios == max(speed_picture.speedups(row)):
            assert said_speed(ratios) in text


@pytest.mark.parametrize("row", MEASURED["arrivals"], ids=str)
def test_the_table_of_arrivals_is_what_was_measured(row):
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").replace("**", "")
    [line] = [
        x
        for x in text.splitlines()
        if x.startswith(f"| {row['rate']} a second | {row['method']} |")
    ]
    cells = [f"{row['e2e_ms']:.0f} ms", f"{row['ttft_ms']:.0f} ms", f"{row['tpot_ms']:.1f} ms"]
    assert line.endswith(f"| {' | '.join(cells)} | {row['tokens_per_second']:,} |")


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
