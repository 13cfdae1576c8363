"""Shows trees and library entries, on a terminal and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from sequoia_vllm.cli.common import counted, new_table
from sequoia_vllm.hardware.choose import Schedule
from sequoia_vllm.library.files import TreeEntry
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.token_tree import TokenTree

_BAR = 24
_BATCHES = (1, 8, 64)


def tree_json(tree: TokenTree, acceptance: Acceptance | None) -> dict[str, Any]:
    """The tree file's JSON object; with a vector also nodes' values and expected tokens."""
    data = {**tree.to_dict(), "num_speculative_tokens": tree.num_speculative_tokens}
    data["nodes_per_level"] = [len(nodes) for nodes in tree.levels]
    if acceptance is not None:
        values = tree.values(acceptance)
        data["expected_tokens"] = float(values.sum())
        data["values"] = [float(f"{value:.6g}") for value in values]
        data["acceptance"] = acceptance.to_list()
    return data


def headline(title: str, tree: TokenTree, acceptance: Acceptance | None) -> Text:
    """Describes the tree in one line."""
    shape = f"{tree.size} nodes with the root, depth {tree.depth}, at most "
    shape += counted(tree.max_branch, "child", "children")
    text = Text.assemble((title, "bold"), f"  {shape if tree.size > 1 else 'the root alone'}")
    if acceptance is not None:
        text.append(f", {tree.expected_tokens(acceptance):.3f} expected tokens per step", "green")
    return text


def draw_tree(tree: TokenTree, acceptance: Acceptance | None, most_nodes: int) -> Group:
    """Draws the first ``most_nodes`` nodes, which are the most valuable, as a tree."""
    shown = min(tree.size, most_nodes)
    values = None if acceptance is None else tree.values(acceptance)
    branches = []
    for node in range(shown):
        label = Text(f"{node}", "bold" if node == 0 else "")
        if values is not None:
            label.append(f"  {values[node]:.4f} ", "dim")
            label.append(_bar(values[node]))
        if node == 0:
            branches.append(Tree(label, guide_style="dim"))
        else:
            branches.append(branches[tree.parents[node]].add(label))
    parts: list[Any] = [branches[0]]
    if shown < tree.size:
        rest = tree.size - shown
        less = counted(rest, "less valuable node")
        parts.append(Text(f"… and {less} (--nodes {tree.size})", "dim"))
    return Group(*parts)


def level_table(tree: TokenTree, acceptance: Acceptance | None) -> Table:
    """Nodes by depth, and the probability that one of them is accepted."""
    with_values = () if acceptance is None else ("accepted", "")
    table = new_table("depth", "nodes", "with children", *with_values, left=("",))
    values = None if acceptance is None else tree.values(acceptance)
    for depth, nodes in enumerate(tree.levels):
        inner = sum(1 for node in nodes if tree.children[node])
        row: list[str | Text] = [str(depth), str(len(nodes)), str(inner)]
        if values is not None:
            share = float(values[nodes].sum())
            row += [f"{share:.3f}", _bar(share)]
        table.add_row(*row)
    return table


def schedule_table(schedule: Schedule, source: str) -> Table:
    """Drafts and expectations by batch size."""
    table = new_table(
        "batch", "drafts", "tokens per step", "speedup", "best tree for it alone",
        title=f"by batch size ({source})",
    )  # fmt: skip
    for entry in schedule.estimates:
        table.add_row(
            str(entry.batch_size),
            str(entry.num_speculative_tokens),
            f"{entry.expected_tokens:.2f}",
            f"{entry.speedup:.2f}x" + (" (extrapolated)" if entry.extrapolated else ""),
            f"{entry.optimum:.2f}x",
        )
    return table


def entries_json(entries: list[TreeEntry]) -> list[dict[str, Any]]:
    """One object for each entry of the library."""
    return [
        {
            "name": entry.name,
            "size": entry.tree.size,
            "depth": entry.tree.depth,
            "tensor_parallel_size": entry.tensor_parallel_size,
            "source": entry.profile.source,
            "expected_tokens": entry.estimates[0].expected_tokens,
            "speedup": {str(e.batch_size): e.speedup for e in entry.estimates},
        }
        for entry in entries
    ]


def entries_table(entries: list[TreeEntry]) -> Table:
    """One row for each entry of the library, with its speedup at a few batch sizes."""
    batches = [f"batch {batch}" for batch in _BATCHES]
    table = new_table("name", "TP", "size", "depth", *batches, "times", left=("name",))
    table.columns[0].overflow = "fold"
    for entry in entries:
        schedule = entry.to_schedule()
        speedups = [f"{schedule.estimate(batch).speedup:.2f}x" for batch in _BATCHES]
        table.add_row(
            entry.name, str(entry.tensor_parallel_size), str(entry.tree.size),
            str(entry.tree.depth), *speedups, entry.profile.source,
        )  # fmt: skip
    return table


def legend() -> str:
    """Explains the columns of `entries_table` and its names."""
    return (
        "names: DEVICE/CLASS/ACCEPTANCE VECTOR; a class is TARGET-DRAFT. TP: devices that a model "
        "is split over. size: nodes, with the root. batch: speed over plain decoding with so many "
        "requests. times: measured, or predicted by the roofline model."
    )


def _bar(value: float) -> Text:
    """A bar whose length shows this probability."""
    colours = ((0.3, "green"), (0.1, "cyan"), (0.03, "blue"), (-1, "bright_black"))
    colour = next(colour for least, colour in colours if value >= least)
    return Text("█" * max(1, round(_BAR * value)), colour)
