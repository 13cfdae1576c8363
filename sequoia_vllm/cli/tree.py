"""``sequoia-vllm tree``: build, list, look at and draw token trees."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from sequoia_vllm.cli.common import (
    console,
    counted,
    fail,
    friendly_errors,
    new_table,
    note,
    print_json,
    progress_bar,
)
from sequoia_vllm.hardware.choose import Schedule
from sequoia_vllm.hardware.device import identify, this_device_name
from sequoia_vllm.hardware.step_profile import HOW_TIMED
from sequoia_vllm.json_file import dump_json
from sequoia_vllm.library.files import LibraryError
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.library.tree_reference import find_tree, find_vector
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.optimize import optimize_tree
from sequoia_vllm.tree.token_tree import MOST_NODES, TokenTree

_BAR = 24

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Build, list, look at and draw token trees. Sizes count the root; depths count edges.",
)

_VECTOR_HELP = (
    'A file, {"acceptance": [...]} or a bare list p[k] / p[d][k], or a name in '
    "the library, like shipped."
)
AcceptanceOption = Annotated[str | None, typer.Option("--acceptance", help=_VECTOR_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TreeArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE|NAME",
        help="Tree file, or a name in the library, like h200/70b-1b/shipped.",
        show_default=False,
    ),
]


@app.command()
def build(
    acceptance: Annotated[str, typer.Option(help=_VECTOR_HELP)],
    size: Annotated[int, typer.Option(help="Nodes, root included.")],
    max_depth: Annotated[
        int | None, typer.Option(help="Most edges from the root to a leaf.")
    ] = None,
    max_branch: Annotated[int | None, typer.Option(help="Most children of a node.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the tree to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build the tree of a size with the most expected tokens.

    Which size is fastest depends on the device: `sequoia-vllm advise` predicts it, and
    `sequoia-vllm tune` measures it.
    """
    with friendly_errors():
        if size > MOST_NODES:  # Its search would take hours.
            fail(f"--size {size}: engines take trees of up to {MOST_NODES:,} nodes")
        vector = find_vector(acceptance)
        with progress_bar("optimising") as report:
            tree = optimize_tree(
                vector, size, max_depth, max_branch, lambda n, of: report("", n, of)
            )
        if tree.size < size:
            note(f"the limits leave room for {tree.size} of the {counted(size, 'node')}")
        data = tree_json(tree, vector)
        if output is not None:
            output.write_text(dump_json(data), encoding="utf-8")
        if as_json:
            print_json(data)
            return
        out = console()
        out.print(headline(str(output or "tree"), tree, vector))
        out.print(level_table(tree, vector))


@app.command()
def show(
    tree: TreeArgument,
    acceptance: AcceptanceOption = None,
    nodes: Annotated[int, typer.Option(help="Most nodes to draw.")] = 48,
    as_json: JsonOption = False,
) -> None:
    """Draw a tree with its levels and the value of each node."""
    with friendly_errors():
        if nodes < 1:
            fail(f"--nodes {nodes}: draw at least 1")
        found = find_tree(tree)
        vector = found.acceptance if acceptance is None else find_vector(acceptance)
        if as_json:
            data = {"name": found.title, **tree_json(found.tree, vector)}
            if found.entry is not None:
                data["entry"] = found.entry.to_dict()
            print_json(data)
            return
        out = console()
        out.print(headline(found.title, found.tree, vector))
        out.print(draw_tree(found.tree, vector, nodes))
        out.print()
        out.print(level_table(found.tree, vector))
        if found.entry is not None:
            out.print()
            shown = HOW_TIMED[found.entry.profile.source]
            out.print(schedule_table(found.entry.to_schedule(), shown))
        if vector is None:
            note("the file holds no acceptance vector: give --acceptance to see values")


@app.command()
def plot(
    tree: TreeArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Picture to write: .svg, .png or .pdf.")
    ],
    acceptance: AcceptanceOption = None,
) -> None:
    """Draw a tree into a picture file."""
    from sequoia_vllm.cli.tree_picture import plot_tree

    with friendly_errors():
        found = find_tree(tree)
        vector = found.acceptance if acceptance is None else find_vector(acceptance)
        plot_tree(found.tree, vector, found.title, output)
        console().print(f"wrote {output}", soft_wrap=True)


@app.command("list")
def list_trees(
    device: Annotated[
        str | None, typer.Option(help="Its id, or the driver's name for it. Default: this one.")
    ] = None,
) -> None:
    """List the trees for a device, and the devices that have some."""
    with friendly_errors():
        library = TreeLibrary()
        wanted = identify(this_device_name() if device is None else device).id
        entries = [entry for entry in library.entries() if entry.name.startswith(f"{wanted}/")]
        if device is not None and not entries:
            raise LibraryError(
                f"no trees for device {device!r}: there are trees for "
                f"{', '.join(library.devices())}"
            )
        table = new_table("tree", "nodes", "depth", left=("tree",))
        for entry in entries:
            table.add_row(entry.name, str(entry.tree.size), str(entry.tree.depth))
        console().print(table)
        console().print(f"devices: {', '.join(library.devices())}", soft_wrap=True)


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


def _bar(value: float) -> Text:
    """A bar whose length shows this probability."""
    colours = ((0.3, "green"), (0.1, "cyan"), (0.03, "blue"), (-1, "bright_black"))
    colour = next(colour for least, colour in colours if value >= least)
    return Text("█" * max(1, round(_BAR * value)), colour)
