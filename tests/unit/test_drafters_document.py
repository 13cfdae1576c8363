"""docs/drafters.md says what the table of known drafters and the cost model say."""

import re
from itertools import groupby
from pathlib import Path

from sequoia_vllm.drafters.registry import DRAFTERS
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import identify
from sequoia_vllm.hardware.models import every_class
from sequoia_vllm.hardware.roofline import roofline_profile
from sequoia_vllm.tree import Acceptance
from tests.support.reference_trees import published

DOCUMENT = (Path(__file__).parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")
SHIPPED = Acceptance.of(published()["shipped"])


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


def test_targets_of_known_heads_are_those_they_are_listed_for():
    for target, *cells in rows("## Known heads"):
        for pair in (*DRAFTERS["eagle3"].known, *DRAFTERS["dflash"].known):
            takes = re.fullmatch(pair.target, target, flags=re.IGNORECASE) is not None
            assert takes == any(f"`{pair.draft}`" in cell for cell in cells), (target, pair.draft)


def test_predictions():
    device = identify("h100-sxm").spec
    found = []
    for name in ("8b-1b", "8b-eagle3", "8b-dflash"):
        pair = every_class()[name]
        profile = roofline_profile(device, pair.target, pair.draft)
        cost = CostModel(profile)
        for batch in (1, 16):
            tree = choose_tree(SHIPPED, profile, batch)
            estimate = cost.estimate(tree, SHIPPED, batch)
            committed = estimate.expected_tokens
            first = float(cost.first_draft_seconds(committed, tree.depth, batch))
            found.append([
                f"`{name}`", str(batch), f"{1e3 * first:.2f}",
                f"{1e3 * float(cost.draft_seconds(1, batch)):.2f}", str(tree.size),
                str(tree.depth), f"{committed:.2f}", f"{estimate.speedup:.2f}x",
            ])  # fmt: skip
    assert rows("## What they cost, predicted") == found, "\n".join(
        f"| {' | '.join(row)} |" for row in found
    )
