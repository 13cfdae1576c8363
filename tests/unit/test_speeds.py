"""Measured speeds in benchmarks/speeds: the documents say them, and they are drawn."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

from benchmarks import speed_picture
from benchmarks.serving.table import make_summary

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "speeds" / "h100.json"
MEASURED = json.loads(FILE.read_text(encoding="utf-8"))


# What the file of a table says of its measurement, and the names that it may have for it.
SAID = {
    "command": {"argv", "commands"}, "commit": {"commit", "git"}, "versions": {"versions"},
    "device": {"device"}, "date": {"date", "time"},
}  # fmt: skip
TABLES = sorted((ROOT / "benchmarks").rglob("*.json*"))


def said_by(data):
    """All keys with a value, at any depth."""
    if isinstance(data, dict):
        return {key for key, value in data.items() if value}.union(*map(said_by, data.values()))
    return set()


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.name)
def test_a_table_has_its_command_commit_versions_device_and_date(file):
    """Files until 2026-11-26 name in "lacks" what nobody can tell any more."""
    text = file.read_text(encoding="utf-8")
    heads = text.splitlines()[:2] if file.suffix == ".jsonl" else [text]
    said = said_by({number: json.loads(head) for number, head in enumerate(heads)})
    missing = {what for what, names in SAID.items() if not names & said}
    lacks = json.loads(heads[0]).get("lacks", [])
    assert missing == set(lacks)
    assert not lacks or min(re.findall(r"2026-\d\d-\d\d", text)) <= "2026-11-26"


def said_speed(ratios):
    """As tables say it: the median, and the range of rounds."""
    return f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8").replace("**", "")


@pytest.mark.parametrize("row", MEASURED["speeds"], ids=str)
def test_the_table_is_what_was_measured(row):
    how = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']}"
    count = f"{row['requests']} request{'s' * (row['requests'] > 1)}"
    plain = row["rounds"][0]
    over = [[one / base for one, base in zip(r, plain, strict=True)] for r in row["rounds"]]
    ratios = dict(zip(MEASURED["methods"], over, strict=True))
    shown = [
        said_speed(ratios[name]) for name in ("vLLM's chain of 6", "vLLM's chain of 3", "Sequoia")
    ]
    line = f"| {how}, {count} | {median(row['rounds'][0]):,.0f} | {' | '.join(shown)} |"
    assert line in text_of("docs/benchmarks.md")


@pytest.mark.parametrize("row", MEASURED["arrivals"], ids=str)
def test_the_table_of_arrivals_is_what_was_measured(row):
    start = f"| {row['rate']} a second | {row['method']} |"
    [line] = [x for x in text_of("docs/benchmarks.md").splitlines() if x.startswith(start)]
    cells = [f"{row['e2e_ms']:.0f} ms", f"{row['ttft_ms']:.0f} ms", f"{row['tpot_ms']:.1f} ms"]
    assert line.endswith(f"| {' | '.join(cells)} | {row['tokens_per_second']:,} |")
    if row["method"] != "vLLM's chain of 6":
        [line] = [
            x for x in text_of("README.md").splitlines() if x.startswith(f"| {row['rate']} a s")
        ]
        assert f" {row['e2e_ms']:.0f} ms |" in line


def compared_by_bench(file):
    """Results of `bench` in a table's file."""
    text = file.read_text(encoding="utf-8")
    parts = map(json.loads, text.splitlines() if file.suffix == ".jsonl" else [text])
    compared = (part for part in parts if part.get("what", "bench") == "bench")
    return [row for part in compared for row in part.get("results", [])]


# The H100's have another form, or are in the notebook.
COMPARED = [x for x in TABLES if compared_by_bench(x) and not x.name.startswith("h100")]


@pytest.mark.parametrize("file", COMPARED, ids=lambda file: file.name)
def test_the_page_has_the_ratios_of_bench(file):
    said, speeds = text_of("docs/benchmarks.md"), [x["speedup"] for x in compared_by_bench(file)]
    ratios = [f"{x['median']:.2f}x ({x['low']:.2f} to {x['high']:.2f}" for x in speeds]
    assert {one for one in ratios if one not in said} <= {"1.00x (1.00 to 1.00"}  # plain vLLM's


def test_the_table_of_servers_is_what_the_command_prints():
    file = ROOT / "benchmarks" / "speeds" / "serving-xeon.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert make_summary(rows) in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_it_is_drawn(tmp_path):
    file, picture = ROOT / "benchmarks" / "gpu" / "h200.jsonl", tmp_path / "h200.svg"
    speed_picture.main(file, picture)
    drawn = picture.read_text(encoding="utf-8")
    names = {row["method"] for row in speed_picture.greedy_cases(file)[0]}
    assert len(names) == 6
    assert all(f"<!-- {name} -->" in drawn for name in names)
    assert drawn == (ROOT / "docs" / "h200.svg").read_text(encoding="utf-8")
