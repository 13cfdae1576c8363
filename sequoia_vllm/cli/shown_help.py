"""Changes how typer parses options and shows help, where its defaults do not suit."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from typer.core import TyperCommand

ALIASES = {"--target": "--model", "--draft": "--draft-model", "--batch": "--batch-sizes"}
"""Other spellings of options, accepted but not shown in help."""


class AliasedCommand(TyperCommand):
    """A command that also accepts `ALIASES` of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replaces aliases by their options, then parses like typer."""
        names = {name for param in self.params for name in param.opts}
        return super().parse_args(ctx, [own for one in args for own in _option(one, names)])


def _option(given: str, names: set[str]) -> list[str]:
    """Replaces an alias in one argument by the option of a command with these names."""
    name, equals, value = given.partition("=")
    own = name if name in names else ALIASES.get(name, name)
    if own == "--model" and "model" in names:  # advise MODEL
        return [value] if equals else []
    return [own + equals + value] if own in names else [given]


def shown_as_written(command: Any) -> Any:
    """Makes a command, or all commands of a group, show help texts as written; returns it.

    Typer drops square brackets as markup, and calls a number with bounds "int range".
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
