"""Entries of the ledger, and the notation of its tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Literal

Kind = Literal["patch", "added_field", "swap", "subclass", "instance"]

_NOTATION = re.compile(r"([\w.]*)(?:\((.*)\))?")


@dataclass(frozen=True)
class Signature:
    """Parameters of something that can be called: names in order, and those without a default."""

    names: tuple[str, ...]
    required: frozenset[str]


@dataclass(frozen=True)
class Expected:
    """An attribute of vLLM, and how it must look.

    Attributes:
        path: ``module:attribute[.attribute]``; the last may be a field of a dataclass.
        parameters: Names of its parameters in order; None: it only must exist.
        may_grow: We only call it, and pass no more than ``parameters``: others may
            follow if they are optional. What we override must take exactly these.
        since: The first version that has it, (major, minor); None: all that we support.
        before: The first version that has it no longer, or otherwise; None: none that we support.
    """

    path: str
    parameters: tuple[str, ...] | None = None
    may_grow: bool = False
    since: tuple[int, int] | None = None
    before: tuple[int, int] | None = None

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


@dataclass(frozen=True)
class Override(Expected):
    """Something of vLLM that we replace.

    A *patch* replaces a function of vLLM in place, in every process that loads the
    plugin (and passes through unless Sequoia is asked for); an *added field* is a new field,
    None by default, of a message of vLLM; a *swap* replaces a name for the length of one call;
    a *subclass* overrides a method or an attribute in a class that vLLM is told to use;
    an *instance* is an attribute that we set on one object of vLLM, in the place of what
    vLLM had put there.

    Attributes:
        path: ``module:name`` or ``module:Class.attribute``; the class is the one that ours
            derives from, or that has the field. For an instance
            ``module:Class.attribute[.attribute]``, by the class that sets the first.
        may_grow: Ours passes on what it is given: other parameters may follow if they
            are optional.
        kind: See above.
        until: When this can go.
        why: Why vLLM's own does not do.
        checked_at: For an instance, whose attribute is not seen: where a class of vLLM
            has what is replaced; None: there is nothing to check.
    """

    _: KW_ONLY
    kind: Kind
    until: str
    why: str
    checked_at: str | None = None

    @property
    def expected(self) -> Expected | None:
        """What the contract checks; None where there is nothing that it could see."""
        path = self.checked_at if self.kind in ("added_field", "instance") else self.path
        return Expected(path, self.parameters, self.may_grow, self.since) if path else None


def _parsed(notation: str) -> tuple[str, tuple[str, ...] | None, bool]:
    """Path, parameters and whether others may follow: ``a.b``, ``f(x, y)``, ``f(x, ...)``."""
    found = _NOTATION.fullmatch(notation)
    if found is None:
        raise ValueError(f"{notation!r} is no name with parameters")
    if found[2] is None:
        return found[1], None, False
    names = tuple(filter(None, found[2].split(", ")))
    may_grow = names[-1:] == ("...",)
    return found[1], names[:-1] if may_grow else names, may_grow


def expected(
    notation: str,
    since: tuple[int, int] | None = None,
    before: tuple[int, int] | None = None,
) -> Expected:
    """An `Expected` in the notation of `table`."""
    return Expected(*_parsed(notation), since, before)


def _override(
    kind: Kind,
    notation: str,
    until: str,
    why: str,
    since: tuple[int, int] | None = None,
    checked_at: str | None = None,
) -> Override:
    return Override(
        *_parsed(notation), kind=kind, until=until, why=why, since=since, checked_at=checked_at
    )


patch = partial(_override, "patch")
added_field = partial(_override, "added_field")
swap = partial(_override, "swap")
subclass = partial(_override, "subclass")
instance = partial(_override, "instance")


def table(rows: Mapping[str, Sequence[str | Expected]]) -> tuple[Expected, ...]:
    """Entries with full paths.

    Args:
        rows: By ``module`` or ``module:Class``: its entries, with paths within it. A text is an
            `Expected`: ``name`` must exist, ``name(a, b)`` takes exactly these parameters, and
            ``name(a, b, ...)`` may take others that are optional. Without a name it is the class.
    """
    entries = []
    for owner, listed in rows.items():
        for item in listed:
            entry = expected(item) if isinstance(item, str) else item
            dot = "" if not entry.path else "." if ":" in owner else ":"
            entries.append(replace(entry, path=f"{owner}{dot}{entry.path}"))
    return tuple(entries)
