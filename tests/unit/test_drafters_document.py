"""docs/drafters.md says what the table of known drafters and the cost model say."""

import re
from itertools import groupby
from pathlib import Path

from sequoia_vllm.drafters.registry import DRAFTERS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")


def rows(after: str) -> list[list[str]]:
    """Cells of the first table after this text, without its head."""
    lines = DOCUMENT[DOCUMENT.index(after) :].splitlines()
    tables = [
        list(group) for is_row, group in groupby(lines, lambda x: x.startswith("|")) if is_row
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[0][2:]]


def test_every_kind_has_a_row():
    kinds = {re.findall(r"`\"(\w+)\"`", row[1])[0] for row in rows("## Kinds")}
    assert kinds == set(DRAFTERS)


def test_known_heads_are_listed():
    """In the table's order, the preferred one of each kind first."""
    listed = {kind: [] for kind in ("eagle3", "dflash")}
    for _, eagle_3, dflash in rows("## Known heads"):
        listed["eagle3"] += re.findall(r"`([^`]+)`", eagle_3)
        listed["dflash"] += re.findall(r"`([^`]+)`", dflash)
    for kind, drafts in listed.items():
        assert drafts == [known.draft for known in DRAFTERS[kind].known]
