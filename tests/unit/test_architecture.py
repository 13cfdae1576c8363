"""The packages of docs/architecture.md: what each imports, and that no arrow goes up."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sequoia_vllm"
DOCUMENT = ROOT / "docs" / "architecture.md"


def part_of(name: str) -> str | None:
    """The package or module right below `sequoia_vllm` that a dotted name lies in."""
    parts = name.split(".")
    return parts[1] if parts[0] == "sequoia_vllm" and len(parts) > 1 else None


def imports() -> dict[str, set[str]]:
    """Of each package or module below `sequoia_vllm`: the others that it imports, lazily or not."""
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        relative = file.relative_to(PACKAGE)
        part = relative.parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        names = found.setdefault(part, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names.add(part_of(node.module or "") or "")
            elif isinstance(node, ast.Import):
                names |= {part_of(alias.name) or "" for alias in node.names}
        names -= {part, "", "__version__"}
    return found


def listed() -> list[tuple[str, set[str]]]:
    """Rows of the document's table, in its order."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)/?\]\([^)]*\) \| [^|]* \| ([^|]*) \|$", text, flags=re.MULTILINE)
    return [(part, set(re.findall(r"\w+", used))) for part, used in rows]


def test_all_that_is_imported_is_in_the_table():
    assert dict(listed()) == imports()


@pytest.mark.parametrize("place", range(len(listed())))
def test_no_arrow_goes_up(place):
    part, used = listed()[place]
    below = {name for name, _ in listed()[:place]}
    assert used <= below, f"{part} imports {sorted(used - below)}, which stand above it"
