"""Options and output of tools about predicted times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

ClassOption = Annotated[
    str, typer.Option("--class", help="Model class: <target size>-<draft size>.")
]
ContextOption = Annotated[int, typer.Option(help="Committed tokens per request.")]
DtypeOption = Annotated[str, typer.Option(help="Weight and KV cache type.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table, as in `benchmarks/predictions.md`."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
