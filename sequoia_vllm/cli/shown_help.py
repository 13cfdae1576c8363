"""How commands read their options and show their help, where typer's defaults do not suit."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from typer.core import TyperCommand

ALIASES = {"--target": "--model", "--draft": "--draft-model", "--batch": "--batch-sizes"}
"""Other spellings of options, accepted and not shown."""


class AliasedCommand(TyperCommand):
    """A command that takes `ALIASES` of the options it has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses as typer does, with aliases put in their options' place."""
        names = {name for param in self.params for name in param.opts}
        return super().parse_args(ctx, [own for one in args for own in _option(one, names)])


def _option(given: str, names: set[str]) -> list[str]:
    """An argument of the command line, spelled as the command with these names spells it."""
    name, equals, value = given.partition("=")
    own = name if name in names else ALIASES.get(name, name)
    if own == "--model" and "model" in names:  # advise MODEL
        return [value] if equals else []
    return [own + equals + value] if own in names else [given]


def shown_as_written(command: Any) -> Any:
    """Makes a command, and those of a group, show their help texts as they are written.

    Typer takes square brackets for markup and drops them, and calls a number with a bound
    "int range".

    Returns:
        The same.
    """
    command.help = command.help and escape(command.help)
    for param in command.params:
        if getattr(param, "help", None):
            param.help = escape(param.help)
        bounds = (getattr(param, "min", None), getattr(param, "max", None))
        if param.metavar is None and bounds != (None, None):
            is_float = any(isinstance(value, float) for value in (*bounds, param.default))
            param.metavar = "<float>" if is_float else "<int>"
    for found in getattr(command, "commands", {}).values():
        shown_as_written(found)
    return command
