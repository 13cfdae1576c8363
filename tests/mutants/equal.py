"""The kept list of mutants that were read and change nothing: ``equal.diff`` beside this file.

An entry names file and function, has the changed lines without indentation, and ends with why:

    @@ tree/optimize.py _Solution.of
    -if progress is not None and n % 16 == 0:
    +if progress is not None and n / 16 == 0:
    = Fewer reports of progress; the last one is another line's.

Several changes may share a reason. A place in the file is not named, so lines may move.
"""

from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("equal.diff")


class Change(NamedTuple):
    """What identifies a mutant."""

    file: str  # below the package
    function: str
    lines: tuple[str, ...]  # `making.changed_lines`

    def __str__(self) -> str:
        return "\n".join((f"@@ {self.file} {self.function}", *self.lines))


def read_equal(text: str) -> dict[Change, str]:
    """Each listed change with its reason. Raises ValueError if one has none."""
    found: dict[Change, str] = {}
    place: list[str] = []  # file and function
    lines: list[str] = []  # of the change that is being read
    changes: list[Change] = []  # which wait for their reason
    for line in [*text.splitlines(), "@@ end end"]:
        starts_change = line.startswith("-") and lines and lines[-1].startswith("+")
        if lines and (starts_change or not line.startswith(("-", "+"))):
            changes.append(Change(*place, tuple(lines)))
            lines = []
        if line.startswith(("-", "+")):
            lines.append(line)
        elif reason := line.removeprefix("=").strip() if line.startswith("=") else "":
            found |= dict.fromkeys(changes, reason)
            changes = []
        elif line.startswith("@@ "):
            if changes:
                raise ValueError(f"no reason follows:\n{changes[0]}")
            place = line.split()[1:]
    return found
