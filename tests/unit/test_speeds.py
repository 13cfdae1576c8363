"""Measured speeds in benchmarks/speeds: the documents say them."""

import json
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "speeds" / "h100.json"
MEASURED = json.loads(FILE.read_text(encoding="utf-8"))


def said_speed(ratios):
    """As tables say it: the median, and the range of rounds."""
    return f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8").replace("**", "")


@pytest.mark.parametrize("row", MEASURED["speeds"], ids=str)
def test_the_table_is_what_was_measured(row):
    how = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']}"
    count = f"{row['requests']} request{'s' * (row['requests'] > 1)}"
    plain, *_ = row["rounds"]
    ratios = {
        name: [one / base for one, base in zip(found, plain, strict=True)]
        for name, found in zip(MEASURED["methods"], row["rounds"], strict=True)
    }
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
