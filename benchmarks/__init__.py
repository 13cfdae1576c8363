"""What developers measure in a checkout; no part of the product."""

from collections.abc import Iterable, Sequence

# The pair in ``examples/models``, and its prompts.
TARGET, DRAFT = "examples/models/target", "examples/models/draft"
PROMPTS = "examples/models/prompts.jsonl"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table, as in `benchmarks/predictions.md`."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
