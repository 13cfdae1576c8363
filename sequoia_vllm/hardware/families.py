"""Families of models that vLLM serves: whether trees serve them, known drafts, and what shows it.

The file beside this one has a row for each. docs/supported.md is made from it.
"""

from collections.abc import Collection
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sequoia_vllm.drafters.registry import Drafter, known_for
from sequoia_vllm.hardware.support import UNSUPPORTED, Kind, Role, kinds_of, refusal, refused_kinds
from sequoia_vllm.json_file import FileModel

_FILE = Path(__file__).with_name("families.json")


class Family(FileModel):
    """A row: models that share classes of vLLM."""

    family: str
    architectures: tuple[str, ...] = Field(description="vLLM's classes, as config.json names them.")
    models: tuple[str, ...] = Field(description="Names on the Hub, with * for what may follow.")
    config: dict[str, Any] = Field(default={})  # what else of config.json tells the kind of model
    proved: tuple[Literal["H100", "rehearsed", "interpreted", "tiny model"], str] | None = None
    """How it was seen to run, and the file that shows it."""
    note: str = ""  # where it runs, if not everywhere; or what refuses it, closer

    @property
    def kinds(self) -> list[Kind]:
        """What keeps trees from serving it as a target, by the rules of engines."""
        return refused_kinds(
            "target", kinds_of({**self.config, "architectures": self.architectures})
        )

    @property
    def shown(self) -> str:
        """How it was seen to run as a target."""
        return self.proved[0] if self.proved else "by class only"

    def known(self) -> dict[Drafter, str]:
        """The first known draft of each kind, for any of its models."""
        names = (model.replace("*", "") for model in self.models)
        pairs = [pair for name in names for pair in known_for(name)]
        return {kind: known.draft for kind, known in reversed(pairs)}

    def likeness(self, name: str) -> int:
        """How many letters of a name or path fit one of its models; 0: it is none of them."""
        name = Path(name).name.lower()
        fitting = (one.partition("/")[2] for one in self.models)
        return max((len(one) for one in fitting if fnmatch(name, one.lower())), default=0)


class FamilyFile(FileModel):
    """All rows."""

    described = "table of families"
    verified: str  # date on which tests last compared them with vLLM's classes
    vllm: str  # its version then
    families: tuple[Family, ...]


@cache
def family_file() -> FamilyFile:
    """The table."""
    return FamilyFile.load(_FILE)


def family_of(
    name: str, architectures: Collection[str] = (), kinds: Collection[Kind] = ()
) -> Family | None:
    """The row of a model; None: there is none. Without architectures, which its configuration
    names, only the name tells; ``kinds`` are what its configuration says that it is."""
    rows = [
        row
        for row in family_file().families
        if (set(row.architectures) & set(architectures) if architectures else row.likeness(name))
    ]
    found = refused_kinds("target", kinds) if architectures else None
    return max(rows, key=lambda row: (row.kinds == found, row.likeness(name)), default=None)


def refusal_of(
    name: str, role: Role, architectures: Collection[str], kinds: Collection[Kind]
) -> str | None:
    """`refusal`, with the row of a target where there is one."""
    row = family_of(name, architectures, kinds) if role == "target" else None
    return refusal(name, role, kinds, see(row))


def see(row: Family | None) -> str:
    """The closer reason, and where a target's row is, if all of its family are refused."""
    if row is None or not row.kinds:
        return ""
    why = f"{row.note}; " if row.note else ""
    return f" ({row.family}: {why}see docs/supported.md#refused-targets)"


def in_words(name: str, architectures: Collection[str], kinds: Collection[Kind]) -> str:
    """A model's row in one line: family, whether it runs as a target, and known drafts.

    Without architectures, which its configuration names, its family's are taken.
    """
    row = family_of(name, architectures, kinds)
    if row is not None and not architectures:
        kinds = row.kinds
    classes = f" ({', '.join(architectures)})" if architectures else ""
    said = f"{row.family if row else 'no family in docs/supported.md'}{classes}: "
    if found := refused_kinds("target", kinds):
        why = " and ".join(UNSUPPORTED[kind] for kind in found)
        return f"{said}refused as a target, as it {why}{'' if architectures else see(row)}"
    said += "runs by its configuration" if row is None else f"runs as a target ({row.shown}"
    said += f"; {row.note})" if row and row.note else ")" if row else ""
    known = {kind: known.name_for(name) for kind, known in reversed(known_for(name))}
    place = {True: ", the default on GPUs", False: ", not run here"}
    drafts = [
        f"{known[kind]} ({kind.short_name}{place[kind.by_default] if kind.is_head else ''})"
        for kind in sorted(known, key=lambda kind: (kind.is_head, kind.rank))
    ]
    return f"{said}; known drafts: {', '.join(drafts) or 'none'}"
