"""Something of vLLM that we replace."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from sequoia_vllm.engine.compat.ledger.expected import Expected

Kind = Literal["patch", "field", "swap", "subclass", "instance"]


@dataclass(frozen=True)
class Override:
    """One override.

    A *patch* replaces a function of vLLM in place, in every process that loads the
    plugin (and passes through unless Sequoia is asked for); a *field* adds a field, None
    by default, to a message of vLLM; a *swap* replaces a name for the length of one call;
    a *subclass* overrides a method or an attribute in a class that vLLM is told to use;
    an *instance* is an attribute that we set on one object of vLLM, in the place of what
    vLLM had put there.

    Attributes:
        path: ``module:name`` or ``module:Class.attribute``; the class is the one that ours
            derives from, or that has the field. For an instance
            ``module:Class.attribute[.attribute]``, by the class that sets the first.
        parameters: Names of its parameters in order; None: it only must exist.
        kind: See above.
        why: Why vLLM's own does not do.
        until: When this can go.
        since: The first version that has it, (major, minor); None: all that we support.
        may_grow: Ours passes on what it is given: other parameters may follow if they
            are optional.
        checked_at: For an instance, whose attribute is not seen: where a class of vLLM
            has what is replaced; None: there is nothing to check.
    """

    path: str
    parameters: tuple[str, ...] | None = None
    _: KW_ONLY
    kind: Kind
    why: str
    until: str
    since: tuple[int, int] | None = None
    may_grow: bool = False
    checked_at: str | None = None

    @property
    def expected(self) -> Expected | None:
        """What the contract checks; None where there is nothing that it could see."""
        path = self.checked_at if self.kind in ("field", "instance") else self.path
        return Expected(path, self.parameters, self.may_grow, self.since) if path else None
