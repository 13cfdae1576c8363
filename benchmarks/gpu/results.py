"""The file of results: one JSON object a line, appended as soon as something is known.

A run that ends at any moment keeps what it has, and the next run goes on after it. Standard library
only.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA = "sequoia-vllm/gpu-run/v1"
FILE = "results.jsonl"
State = Literal["done", "failed", "timeout", "ended"]


class GpuRunError(Exception):
    """A run that cannot begin, or results that cannot be used; the message names the fix."""


@dataclass
class ItemResults:
    """What is known of one item."""

    # Values of each part that was measured, by its name; "start" is the engine's start.
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    has_begun: bool = False
    state: State | None = None  # how its last run ended; None: it did not, or never began
    seconds: float = 0.0
    skipped: str = ""  # why it cannot run here; "" if it can


class Results:
    """Results of one machine and one commit, in a folder.

    Args:
        file: The file; it need not be there.

    Raises:
        GpuRunError: The file is not of this format.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.items: dict[str, ItemResults] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                self._take(json.loads(line))
            except ValueError:  # a process was killed while it wrote: the rest counts
                continue
            except (KeyError, TypeError, AttributeError) as error:
                raise GpuRunError(f"{file} has a line that is no result: {line[:80]}") from error

    def of(self, item: str) -> ItemResults:
        """The item's results; empty if it never ran."""
        return self.items.setdefault(item, ItemResults())

    def add(self, item: str, **values: Any) -> None:
        """Appends one line and takes it over."""
        line = {"schema": SCHEMA, "item": item, **values}
        with self.file.open("a", encoding="utf-8") as file:
            file.write("\n" * self._is_cut_off() + json.dumps(line) + "\n")
        self._take(line)

    def _is_cut_off(self) -> bool:
        """Whether the last line was not written to its end."""
        return self.file.stat().st_size > 0 and not self.file.read_bytes().endswith(b"\n")

    def _take(self, line: dict[str, Any]) -> None:
        if line["schema"] != SCHEMA:
            raise GpuRunError(f"{self.file} has lines of {line['schema']!r}; I read {SCHEMA!r}")
        found = self.of(line["item"])
        if "skipped" in line:
            found.skipped = line["skipped"]
        elif "begins" in line:
            found.skipped, found.has_begun, found.state, found.errors = "", True, None, {}
        elif "state" in line:
            found.state, found.seconds = line["state"], line["seconds"]
        elif "error" in line:
            found.errors[line["part"]] = line["error"]
        else:
            found.parts[line["part"]] = line["values"]
            found.errors.pop(line["part"], None)
