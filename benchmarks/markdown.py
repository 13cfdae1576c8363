"""Tables of the tools' results, in Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table, as in `benchmarks/predictions.md`."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
