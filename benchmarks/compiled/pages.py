"""The pages of tests/kernels/compiled: what variants take, and the sources that gave it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compiled.compiling import Resources

_ROW = re.compile(
    r"^sm_(?P<capability>\d+) +(?P<name>\S.*?) +(?P<registers>\d+) registers"
    r" +(?P<spilled_bytes>\d+) B spilled +(?P<shared_bytes>\d+) B shared$",
    re.MULTILINE,
)
_SOURCE = re.compile(r"^(\w+) +([0-9a-f]{16})$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """What one Triton makes of the kernels."""

    triton_version: str
    table: tuple[Resources, ...]
    sources: Mapping[str, str]  # `source_hashes` of the kernels that were compiled

    @staticmethod
    def read(folder: Path, triton_version: str) -> Page:
        """The page of a Triton; an empty one if there is none yet."""
        path = folder / f"triton-{triton_version}.md"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        rows = [match.groupdict() for match in _ROW.finditer(text)]
        table = [
            Resources(name=row.pop("name"), **{key: int(value) for key, value in row.items()})
            for row in rows
        ]
        return Page(triton_version, tuple(table), dict(_SOURCE.findall(text)))

    def write(self, folder: Path) -> None:
        """To the Triton's page in ``folder``, as Markdown."""
        rows = "\n".join(map(line, self.table))
        sources = "\n".join(f"{kernel:32} {digest}" for kernel, digest in self.sources.items())
        text = f"""# The GPU kernels, compiled with Triton {self.triton_version}

Registers per thread, bytes spilled and shared memory per program, from
`python -m benchmarks.compiled`: see [the other files here](README.md).

```
{rows}
```

Compiled from these sources: a hash of each kernel's code and launches.

```
{sources}
```
"""
        path = folder / f"triton-{self.triton_version}.md"
        path.write_text(text, encoding="utf-8")

    def stale(self, sources: Mapping[str, str]) -> list[str]:
        """The kernels that have changed, are new or are no more, by the present ``sources``."""
        names = {**self.sources, **sources}
        return [name for name in names if self.sources.get(name) != sources.get(name)]

    def replaced(self, rows: Iterable[Resources]) -> dict[tuple[str, int], Resources]:
        """The table by name and capability, ``rows`` in the place of its own."""
        return {(row.name, row.capability): row for row in (*self.table, *rows)}


def line(row: Resources) -> str:
    """A row of the table, for people."""
    return (
        f"sm_{row.capability:<4} {row.name:77} {row.registers:4} registers"
        f" {row.spilled_bytes:5} B spilled {row.shared_bytes:7} B shared"
    )
