"""``sequoia-vllm tree``: build, list, look at and draw token trees."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
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
from sequoia_vllm.figures import GREY, INK, PALE, check_format, new_figure, save_figure
from sequoia_vllm.hardware.device import identify, this_device_name
from sequoia_vllm.hardware.step_profile import HOW_TIMED
from sequoia_vllm.json_file import dump_json
from sequoia_vllm.library.files import LibraryError, TreeEntry
from sequoia_vllm.library.tree_library import TreeLibrary, find_tree, find_vector
from sequoia_vllm.tree import MOST_NODES, Acceptance, TokenTree, optimize_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 24
# Logarithm of the value drawn in the palest colour; below it all look alike.
_FAINTEST = -3.6

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
            out.print(schedule_table(found.entry))
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


def schedule_table(entry: TreeEntry) -> Table:
    """Drafts and expectations by batch size."""
    table = new_table(
        "batch", "drafts", "tokens per step", "speedup", "best tree for it alone",
        title=f"by batch size ({HOW_TIMED[entry.profile.source]})",
    )  # fmt: skip
    for one in entry.estimates:
        table.add_row(
            str(one.batch_size),
            str(one.num_speculative_tokens),
            f"{one.expected_tokens:.2f}",
            f"{one.speedup:.2f}x" + (" (extrapolated)" if one.extrapolated else ""),
            f"{one.optimum:.2f}x",
        )
    return table


def _bar(value: float) -> Text:
    """A bar whose length shows this probability."""
    colours = ((0.3, "green"), (0.1, "cyan"), (0.03, "blue"), (-1, "bright_black"))
    colour = next(colour for least, colour in colours if value >= least)
    return Text("█" * max(1, round(_BAR * value)), colour)


def plot_tree(tree: TokenTree, acceptance: Acceptance | None, title: str, path: Path) -> None:
    """Draws the tree, root on top, and refuses a format that is not one of `FORMATS`.
    Node colour and area show the node's value for this vector; None: all nodes alike."""
    check_format(path)
    values = np.ones(tree.size) if acceptance is None else tree.values(acceptance)
    x, leaves = _layout(tree)
    y = -tree.depths.astype(np.float64)
    width = min(40.0, max(7.0, 0.17 * leaves + 2))
    figure, [axes] = new_figure(width, max(3.5, 0.62 * (tree.depth + 1) + 1.4))
    from matplotlib.collections import LineCollection

    parents = tree.parents_array[1:]
    ends = [np.stack([x[parents], y[parents]], -1), np.stack([x[1:], y[1:]], -1)]
    widths = 0.5 + 2.5 * np.sqrt(values[1:])
    edges = LineCollection(list(np.stack(ends, axis=1)), linewidths=widths, colors=PALE)
    axes.add_collection(edges)
    shown = np.maximum(values, 10.0**_FAINTEST)
    dots = axes.scatter(
        x, y, s=20 + 150 * np.sqrt(values), c=np.log10(shown), cmap="viridis_r", zorder=3,
        edgecolors="white", linewidths=0.7, vmin=_FAINTEST, vmax=0,
    )  # fmt: skip
    heading = f"size {tree.size} with the root, depth {tree.depth}"
    if acceptance is not None:
        heading += f", {values.sum():.3f} expected tokens per step"
        bar = figure.colorbar(dots, ax=axes, pad=0.01, fraction=0.025, aspect=25)
        bar.set_ticks([-3, -2, -1, 0], labels=["0.001", "0.01", "0.1", "1"])
        bar.set_label("probability of being accepted", color=GREY)
        bar.outline.set_visible(False)
    axes.set_title(f"{title}\n", loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.annotate(
        heading, (0, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points",
        color=GREY, fontsize=9,
    )  # fmt: skip
    _levels_axis(axes, tree, values if acceptance is not None else None)
    save_figure(figure, path)


def _layout(tree: TokenTree) -> tuple[NDArray[np.float64], int]:
    """x of every node, ``[size]``: leaves side by side, parents over their first children."""
    x = np.zeros(tree.size)
    leaves = 0
    for node in tree.depth_first:
        if not tree.children[node]:
            x[node] = leaves
            leaves += 1
    for node in reversed(tree.depth_first):
        children = tree.children[node]
        if children:
            x[node] = (x[children[0]] + x[children[-1]]) / 2
    return x, leaves


def _levels_axis(axes: "Axes", tree: TokenTree, values: NDArray[np.float64] | None) -> None:
    labels = []
    for depth, nodes in enumerate(tree.levels):
        count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        share = "" if values is None else f", {values[nodes].sum():.2f}"
        labels.append(f"depth {depth}: {count}{share}")
    axes.set_yticks([-float(depth) for depth in range(tree.depth + 1)], labels=labels)
    axes.set_xticks([])
    axes.margins(x=0.02)
    axes.set_ylim(-tree.depth - 0.5, 0.5)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
