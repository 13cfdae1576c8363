"""``sequoia-vllm tree``: build, list, look at, draw and compare token trees."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from sequoia_vllm.cli.common import console, counted, fail, friendly_errors, note, print_json
from sequoia_vllm.cli.progress import progress_bar
from sequoia_vllm.cli.tree.named import class_in, device_in, names_device, this_device
from sequoia_vllm.cli.tree.view import (
    comparison_table,
    draw_tree,
    entries_json,
    entries_table,
    estimate_json,
    headline,
    legend,
    level_table,
    schedule_table,
    tree_json,
    verdict,
)
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import identify
from sequoia_vllm.hardware.step_profile import HOW_TIMED, Profile
from sequoia_vllm.json_file import dump_json
from sequoia_vllm.library.files import LibraryError
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.library.tree_reference import NamedTree, find_tree, find_vector
from sequoia_vllm.tree.acceptance import Acceptance
from sequoia_vllm.tree.optimize import optimize_tree
from sequoia_vllm.tree.token_tree import MOST_NODES

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Build, list, look at, draw and compare token trees. Sizes count the root; depths count "
    "edges.",
)

_VECTOR_HELP = (
    'A file, {"acceptance": [...]} or a bare list p[k] / p[d][k]; or the name of one of the '
    "library, like shipped; or -: such JSON on standard input."
)
AcceptanceOption = Annotated[str | None, typer.Option("--acceptance", help=_VECTOR_HELP)]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="Times of a device and model pair (JSON).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
BatchOption = Annotated[int, typer.Option("--batch-size", help="Requests in a step.")]
TreeArgument = Annotated[str, typer.Argument(metavar="FILE|NAME", show_default=False)]


@app.command()
def build(
    acceptance: Annotated[str, typer.Option(help=_VECTOR_HELP)],
    size: Annotated[
        int, typer.Option(help="Nodes, root included; with times, the most to consider.")
    ],
    max_depth: Annotated[
        int | None, typer.Option(help="Most edges from the root to a leaf.")
    ] = None,
    max_branch: Annotated[int | None, typer.Option(help="Most children of a node.")] = None,
    profile: ProfileOption = None,
    batch_size: BatchOption = 1,
    output: Annotated[Path | None, typer.Option(help="Write the tree to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Build the tree with the most expected tokens, or with times of a step the fastest.

    Times come from a profile: `sequoia-vllm tune --only times` measures one, and in a checkout
    `python -m benchmarks.roofline` predicts one for another device.
    """
    with friendly_errors():
        if size > MOST_NODES:  # Its search would take hours.
            fail(f"--size {size}: engines take trees of up to {MOST_NODES:,} nodes")
        vector = _given(acceptance)
        extra: dict[str, Any] = {}
        times = None if profile is None else Profile.load(profile)
        if times is None:
            with progress_bar("optimising") as report:
                tree = optimize_tree(
                    vector, size, max_depth, max_branch, lambda n, of: report("", n, of)
                )
            if tree.size < size:
                note(f"the limits leave room for {tree.size} of the {counted(size, 'node')}")
        else:
            tree = choose_tree(
                vector, times, batch_size, size,
                **({} if max_depth is None else {"max_depth": max_depth}), max_branch=max_branch,
            )  # fmt: skip
            if tree.size == 1:
                note("no tree is faster than plain decoding at this batch size")
            extra = estimate_json(CostModel(times).estimate(tree, vector, batch_size))
        data = {**tree_json(tree, vector), **extra}
        if output is not None:
            output.write_text(dump_json(data), encoding="utf-8")
        if as_json:
            print_json(data)
            return
        out = console()
        out.print(headline(str(output or "tree"), tree, vector))
        out.print(level_table(tree, vector))
        if extra:
            out.print(f"{extra['speedup']:.2f}x plain decoding at batch size {batch_size}")


@app.command()
def show(
    tree: TreeArgument,
    acceptance: AcceptanceOption = None,
    nodes: Annotated[int, typer.Option(help="Most nodes to draw.")] = 48,
    as_json: JsonOption = False,
) -> None:
    """Draw a tree with its levels and the value of each node; of a device, list its trees."""
    with friendly_errors():
        if nodes < 1:
            fail(f"--nodes {nodes}: draw at least 1")
        if names_device(tree):
            list_trees(device=tree, as_json=as_json)
            return
        found = find_tree(tree)
        vector = _vector(acceptance, found)
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
    from sequoia_vllm.library.tree_figures import plot_tree

    with friendly_errors():
        found = find_tree(tree)
        plot_tree(found.tree, _vector(acceptance, found), found.title, output)
        console().print(f"wrote {output}", soft_wrap=True)


@app.command("list")
def list_trees(
    device: Annotated[
        str | None, typer.Option(help="Only this device: its id, or the driver's name for it.")
    ] = None,
    model_class: Annotated[
        str | None, typer.Option("--class", help="Only this model class, like 8b-1b.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the trees of the library: your own, this device's, and how many others have."""
    with friendly_errors():
        library = TreeLibrary()
        entries = library.entries()
        if device is not None:
            wanted = identify(device).id
            entries = [entry for entry in entries if device_in(entry.name) == wanted]
            if not entries:
                raise LibraryError(
                    f"no trees for device {device!r}: there are trees for "
                    f"{', '.join(library.devices())}"
                )
        if model_class is not None:
            classes = sorted({class_in(entry.name) for entry in entries})
            entries = [entry for entry in entries if class_in(entry.name) == model_class]
            if not entries:
                raise LibraryError(
                    f"no trees of class {model_class!r}: there are {', '.join(classes)}"
                )
        if as_json:
            directory = None if library.readable is None else str(library.readable)
            print_json({"user_directory": directory, "trees": entries_json(entries)})
            return
        out = console()
        others: dict[str, int] = {}
        if device is None and model_class is None:
            near = ("user", this_device())
            others = Counter(d for e in entries if (d := device_in(e.name)) not in near)
            entries = [entry for entry in entries if device_in(entry.name) in near]
        if entries:
            out.print(entries_table(entries))
        if others:
            listed = ", ".join(f"{name} ({number})" for name, number in others.items())
            out.print(f"more with --device: {listed}", soft_wrap=True)
        out.print(legend(), style="dim", soft_wrap=True)
        where = library.readable or "none, as you have no home directory"
        out.print(f"your own trees: {where}", style="dim", soft_wrap=True)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", show_default=False)],
    acceptance: AcceptanceOption = None,
    profile: ProfileOption = None,
    batch_size: BatchOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Compare two trees (files or library names) under one acceptance vector."""
    with friendly_errors():
        trees = [find_tree(first), find_tree(second)]
        vector = _vector(acceptance, trees[0])
        if vector is None:
            fail("neither --acceptance nor the first tree gives a vector to compare under")
        cost = None if profile is None else CostModel(Profile.load(profile))
        sides = []
        for found in trees:
            side = {"name": found.title, **tree_json(found.tree, vector)}
            side.pop("acceptance")
            if cost is not None:
                side |= estimate_json(cost.estimate(found.tree, vector, batch_size))
            sides.append(side)
        tokens = [side["expected_tokens"] for side in sides]
        result = {
            "acceptance": vector.to_list(),
            "a": sides[0],
            "b": sides[1],
            "expected_tokens_ratio": tokens[0] / tokens[1],
        }
        if as_json:
            print_json(result)
            return
        out = console()
        out.print(comparison_table(sides, [found.tree for found in trees], vector))
        out.print(verdict(sides), soft_wrap=True)


def _vector(reference: str | None, found: NamedTree) -> Acceptance | None:
    """Returns the vector asked for, or else the one the tree was made for."""
    return found.acceptance if reference is None else _given(reference)


def _given(reference: str) -> Acceptance:
    """Returns the vector that --acceptance names; "-" is standard input."""
    return find_vector("/dev/stdin" if reference == "-" else reference)
