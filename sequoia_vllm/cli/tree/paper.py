"""``sequoia-vllm tree paper``: the paper's figures beside what is predicted of its set-ups."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from sequoia_vllm.cli.common import console, friendly_errors, note, print_json
from sequoia_vllm.cli.measuring import JsonOption
from sequoia_vllm.library.paper import PaperComparison

_COLUMNS = (
    "set-up", "T", "paper: tree", "tokens", "speedup", "s/token",
    "vector", "predicted: tokens", "speedup", "with its tokens",
    "our tree", "tokens", "speedup", "s/token",
)  # fmt: skip


def paper(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table, as in docs/trees.md.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the paper's published figures with what optimizer and cost model predict of them."""
    from sequoia_vllm.library.paper import compare_with_paper

    with friendly_errors():
        comparisons = compare_with_paper()
        if as_json:
            print_json({"comparisons": [entry.to_dict() for entry in comparisons]})
        elif markdown:
            typer.echo(markdown_table(comparisons))
        else:
            console().print(rich_table(comparisons))
            note(
                "all but the paper's own columns is predicted from datasheets, at the paper's size "
                "of tree where it states one, and for vectors of other pairs or data; trees as "
                "nodes and edges deep"
            )


def rich_table(comparisons: list[PaperComparison]) -> Table:
    """One line for each set-up and vector."""
    table = Table(
        title="the paper against our model (predicted, not measured)",
        box=None, pad_edge=False, header_style="bold", title_justify="left",
    )  # fmt: skip
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("set-up", "vector") else "right")
    for entry in comparisons:
        table.add_row(*_cells(entry))
    return table


def markdown_table(comparisons: list[PaperComparison]) -> str:
    """The same lines."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(_cells(entry) for entry in comparisons)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(entry: PaperComparison) -> tuple[str, ...]:
    published, compared, chosen = entry.published, entry.compared, entry.chosen
    where = published.device + ("" if entry.offloading is None else f", read {entry.offloading}")
    if published.size is None:
        where += f"; {published.source}"
    tree = f"{published.size}, {published.depth}" if published.size else ""
    tokens = _number(published.tokens)
    return (
        f"{published.target} / {published.draft} ({where})",
        "" if published.temperature is None else f"{published.temperature:g}",
        tree, tokens, f"{published.speedup:.2f}x", _seconds(published.seconds_per_token),
        entry.acceptance,
        f"{compared.tokens:.2f}{_percent(entry.tokens_deviation)}",
        f"{compared.speedup:.2f}x{_percent(entry.speedup_deviation)}",
        "" if entry.speedup_at_its_tokens is None else f"{entry.speedup_at_its_tokens:.2f}x",
        f"{chosen.size}, {chosen.depth}", f"{chosen.tokens:.2f}", f"{chosen.speedup:.2f}x",
        _seconds(chosen.seconds_per_token),
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(deviation: float | None) -> str:
    return "" if deviation is None else f" ({100 * deviation:+.0f} %)"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:#.2g}"
