"""How commands read their options and show their help, where typer's defaults do not suit."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from typer.core import TyperCommand

ALIASES = {"--target": "--model", "--draft": "--draft-model", "--batch-sizes": "--batch"}
"""Other spellings of options, accepted and not shown."""


class AliasedCommand(TyperCommand):
    """A command that takes `ALIASES` of the options it has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses as typer does, with aliases put in their options' place."""
        options = {name for param in self.params for name in param.opts}
        return super().parse_args(ctx, [_option(argument, options) for argument in args])


def _option(argument: str, options: set[str]) -> str:
    name, equals, value = argument.partition("=")
    own = ALIASES.get(name)
    return own + equals + value if own in options and name not in options else argument


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
