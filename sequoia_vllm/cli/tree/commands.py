"""``sequoia-vllm tree``: build, list and look at token trees."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from sequoia_vllm.cli.common import (
    console,
    counted,
    fail,
    friendly_errors,
    note,
    print_json,
    progress_bar,
)
from sequoia_vllm.cli.tree.view import (
    draw_tree,
    entries_json,
    entries_table,
    headline,
    legend,
    level_table,
    schedule_table,
    tree_json,
)
from sequoia_vllm.hardware.device import identify, this_device_name
from sequoia_vllm.hardware.step_profile import HOW_TIMED
from sequoia_vllm.json_file import dump_json
from sequoia_vllm.library.files import LibraryError
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.library.tree_reference import find_tree, find_vector
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.optimize import optimize_tree
from sequoia_vllm.tree.token_tree import MOST_NODES

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Build, list and look at token trees. Sizes count the root; depths count edges.",
)

_VECTOR_HELP = (
    'A file, {"acceptance": [...]} or a bare list p[k] / p[d][k]; a name in the library, '
    "like shipped; or -, for such JSON on standard input."
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
        vector = _given(acceptance)
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
        vector = found.acceptance if acceptance is None else _given(acceptance)
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


@app.command("list")
def list_trees(
    device: Annotated[
        str | None, typer.Option(help="Only this device: its id, or the driver's name for it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the trees of the library: your own, this device's, and how many others have."""
    with friendly_errors():
        library = TreeLibrary()
        entries = library.entries()
        if device is not None:
            wanted = identify(device).id
            entries = [entry for entry in entries if entry.name.split("/")[0] == wanted]
            if not entries:
                raise LibraryError(
                    f"no trees for device {device!r}: there are trees for "
                    f"{', '.join(library.devices())}"
                )
        if as_json:
            directory = None if library.readable is None else str(library.readable)
            print_json({"user_directory": directory, "trees": entries_json(entries)})
            return
        out = console()
        others: dict[str, int] = {}
        if device is None:
            near = ("user", identify(this_device_name()).id)
            others = Counter(d for e in entries if (d := e.name.split("/")[0]) not in near)
            entries = [entry for entry in entries if entry.name.split("/")[0] in near]
        if entries:
            out.print(entries_table(entries))
        if others:
            listed = ", ".join(f"{name} ({number})" for name, number in others.items())
            out.print(f"more with --device: {listed}", soft_wrap=True)
        out.print(legend(), style="dim", soft_wrap=True)
        where = library.readable or "none, as you have no home directory"
        out.print(f"your own trees: {where}", style="dim", soft_wrap=True)


def _given(reference: str) -> Acceptance:
    """The vector that --acceptance names; "-" is standard input."""
    return find_vector("/dev/stdin" if reference == "-" else reference)
