"""Something of vLLM that we use, and how it must look."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """Parameters of something that can be called.

    Attributes:
        names: In order.
        required: Those of them that have no default.
    """

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
