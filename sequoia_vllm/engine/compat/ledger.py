"""What we replace and use of vLLM, as the start-up contract checks it.

`ledger.json` has it. `python -m tests.contract.used` reads our sources and vLLM's, and writes the
file: what is replaced, called and read of vLLM (``everywhere``, or only with ``cpu_v1``: V1 and all
that is for CPUs, ``v2``: Model Runner V2 on every device, ``gpu``), and under ``replaced`` until
when. Why stands where it is replaced, beside a comment or a room's docstring that says "Until:".

What is replaced is a *patch*, in place, in every process that loads the plugin (it passes through
unless Sequoia is asked for); an *added field*, None by default, of a message of vLLM; a *swap* of a
name for the length of one call; a *subclass*'s method or attribute in a class that vLLM is told to
use; or an *instance*'s attribute that we set in the place of what vLLM had put there.

This module imports nothing of vLLM and nothing that it describes. So a device can be checked
without loading another one's code, and other versions' wheels can be read.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LEDGER = Path(__file__).with_name("ledger.json")


@dataclass(frozen=True)
class Signature:
    """Parameters of something that can be called: names in order, and those without a default."""

    names: tuple[str, ...]
    required: frozenset[str]


@dataclass(frozen=True)
class Expected:
    """An attribute of vLLM, and how it must look."""

    path: str  # ``module:attribute[.attribute]``; the last may be a field of a dataclass
    parameters: tuple[str, ...] | None = None  # its parameters' names; None: it must exist
    may_grow: bool = False
    """We only call it, and pass no more than ``parameters``: others may follow if they are
    optional. What we override must take exactly these."""
    since: tuple[int, int] | None = None
    """The first version that has it, (major, minor); None: all that we support."""
    before: tuple[int, int] | None = None
    """The first version that has it no longer, or otherwise; None: none that we support."""

    def is_of(self, release: tuple[int, ...]) -> bool:
        """Whether it is expected of this version, (major, minor)."""
        return (self.since is None or release >= self.since) and (
            self.before is None or release < self.before
        )

    def difference(self, found: Signature) -> str | None:
        """How the signature that was found differs, in words; None if it fits."""
        if self.parameters is None or found.names == self.parameters:
            return None
        known = len(self.parameters)
        if self.may_grow and found.names[:known] == self.parameters:
            added = [name for name in found.names[known:] if name in found.required]
            return f"{self.path} needs {', '.join(added)}, too" if added else None
        rest = ("...",) if self.may_grow else ()
        return (
            f"{self.path} takes ({', '.join(found.names)}), "
            f"not ({', '.join((*self.parameters, *rest))})"
        )


def expected(path: str, parameters: str | None, **versions: Any) -> Expected:
    """An entry of the file: "x, y" are all parameters; "x, y, ..." may grow; None: any."""
    if parameters is None:
        return Expected(path, **versions)
    names = tuple(filter(None, parameters.split(", ")))
    may_grow = names[-1:] == ("...",)
    return Expected(path, names[:-1] if may_grow else names, may_grow, **versions)


def place(name: str) -> tuple[Expected, ...]:
    """What is expected ``everywhere``, or besides with ``cpu_v1``, ``v2`` or ``gpu``."""
    return tuple(expected(path, parameters) for path, parameters in _read()[name].items())


@cache
def _read() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(LEDGER.read_text(encoding="utf-8"))
    return found
