"""``sequoia-vllm tree scaling``: what more devices would do for a pair, predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import typer
from rich.table import Table

from sequoia_vllm.cli.common import console, friendly_errors, note, print_json
from sequoia_vllm.cli.measuring import JsonOption, numbers
from sequoia_vllm.cli.tree.offload import (
    BackendOption,
    LinkOption,
    LinkRateOption,
    OffloadOption,
    offload_of,
)
from sequoia_vllm.cli.tree.roofline import (
    ClassOption,
    ContextOption,
    DtypeOption,
    KindOption,
    RateOption,
    class_of,
    device_of,
    profile_errors,
)
from sequoia_vllm.hardware.models import ModelClass
from sequoia_vllm.hardware.scaling import Prediction, ScalingRow
from sequoia_vllm.library.tree_reference import find_vector

_HEAD = ("device", "TP", "batch")
_COLUMNS = ("plain, ms", "draft level, ms", "nodes", "depth", "tokens per step", "speedup")


def scaling(
    model_class: ClassOption = "70b-1b",
    devices: Annotated[
        str, typer.Option(help="Comma-separated driver names or ids.")
    ] = "h100-sxm,h200",
    tensor_parallel_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,4,8",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated requests in a step.")] = "1,16",
    acceptance: Annotated[
        str, typer.Option(help="Vector: a file, or the name of one of the library.")
    ] = "shipped",
    interconnect_gb_s: RateOption = None,
    interconnect_kind: KindOption = None,
    offload_gb: OffloadOption = None,
    link: LinkOption = None,
    link_gb_s: LinkRateOption = None,
    offload_backend: BackendOption = "prefetch",
    dtype: DtypeOption = "bfloat16",
    context_length: ContextOption = 1024,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table, as in docs/trees.md.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict what more devices do for a pair: the fastest tree at each number of devices."""
    from sequoia_vllm.hardware.scaling import scaling as predicted

    with friendly_errors():
        sizes = numbers("--tensor-parallel-sizes", tensor_parallel_sizes)
        batches = numbers("--batch-sizes", batch_sizes)
        pair, vector = class_of(model_class), find_vector(acceptance)
        specs = [
            device_of(name.strip(), interconnect_gb_s, interconnect_kind, max(sizes))
            for name in devices.split(",")
        ]
        offload = offload_of(offload_gb, link, link_gb_s, offload_backend)
        with profile_errors(context_length):
            rows = predicted(specs, pair, vector, sizes, batches, dtype, context_length, offload)
        if as_json:
            print_json(
                {
                    "source": "roofline",
                    "model_class": pair.id,
                    "target": pair.target.name,
                    "draft": pair.draft.name,
                    "acceptance": vector.to_list(),
                    "dtype": dtype,
                    "context_length": context_length,
                    "rows": [row.to_dict() for row in rows],
                }
            )
        elif markdown:
            typer.echo(markdown_table(rows))
        else:
            console().print(rich_table(rows, pair))
            note("predicted from datasheets by the roofline model; nothing here was measured")


def rich_table(rows: list[ScalingRow], pair: ModelClass) -> Table:
    """One line for each device type, number of devices and batch size."""
    offloaded = "target offloaded, " if any(row.streamed for row in rows) else ""
    table = Table(
        title=f"{pair.target.name} with {pair.draft.name} ({offloaded}predicted, not measured)",
        box=None, pad_edge=False, header_style="bold", title_justify="left",
    )  # fmt: skip
    for name in (*_HEAD, *_COLUMNS):
        justify: Literal["left", "right"] = "left" if name == "device" else "right"
        table.add_column(name, justify=justify, no_wrap=name == _COLUMNS[0])
    for row, cells in _lines(rows):
        table.add_row(*cells, style="dim" if row.problem is not None else None)
    return table


def markdown_table(rows: list[ScalingRow]) -> str:
    """The same lines."""
    names = *_HEAD, *_COLUMNS
    lines = [names, ("---",) * len(names), *(cells for _, cells in _lines(rows))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _lines(rows: list[ScalingRow]) -> Iterator[tuple[ScalingRow, tuple[str, ...]]]:
    """Each row with the cells of one line."""
    for row in rows:
        head = row.device.id, str(row.tensor_parallel_size)
        if row.problem is not None:
            yield row, (*head, "", row.problem, *[""] * (len(_COLUMNS) - 1))
        for entry in row.predictions:
            yield row, (*head, str(entry.batch_size), *_cells(entry))


def _cells(entry: Prediction) -> tuple[str, ...]:
    return (
        f"{1e3 * entry.plain_seconds:.1f}",
        f"{1e3 * entry.draft_level_seconds:.2f}",
        str(entry.size),
        str(entry.depth),
        f"{entry.expected_tokens:.2f}",
        f"{entry.speedup:.2f}x",
    )
