"""The ``sequoia-vllm`` command.

Each command has a module of its own, imported only when called: ``sequoia-vllm tree ...`` never
loads torch or vLLM. Modules that need these import them inside functions, so ``--help`` is quick.
"""

import importlib
import re
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from sequoia_vllm import __version__
from sequoia_vllm.cli.common import ends_by_signal, ends_quietly

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


# Within a paragraph; not before an item of a list.
_LINE_BREAK = re.compile(r"(?<!\n)\n(?![\n -])")


def shown_as_written(command: Any) -> Any:
    """Makes a command, or all of a group, show help as written: Typer drops square brackets as
    markup, keeps line breaks, and calls a number with bounds "int range"."""
    command.help = command.help and escape(_LINE_BREAK.sub(" ", command.help))
    for param in command.params:
        if getattr(param, "help", None):
            param.help = escape(param.help)
            # Bounds in a column of their own leave no room for options' names.
            if bounds_said := getattr(param, "_get_number_range_help_str", lambda: None)():
                param.help += f" ({bounds_said})"
                param._get_number_range_help_str = lambda: None
        bounds = (getattr(param, "min", None), getattr(param, "max", None))
        if param.metavar is None and bounds != (None, None):
            is_float = any(isinstance(value, float) for value in (*bounds, param.default))
            param.metavar = "<float>" if is_float else "<int>"
    for found in getattr(command, "commands", {}).values():
        shown_as_written(found)
    return command


# name -> "module:attribute"; the attribute is a typer app or a plain function.
COMMANDS = {
    "advise": "sequoia_vllm.cli.advise:advise", "tree": "sequoia_vllm.cli.tree:app",
    "tune": "sequoia_vllm.cli.tune:tune", "bench": "sequoia_vllm.cli.bench:bench",
    "verify": "sequoia_vllm.cli.verify:verify",
    "demo": "sequoia_vllm.cli.demo:demo", "doctor": "sequoia_vllm.cli.doctor:doctor",
    "setup-cpu": "sequoia_vllm.cli.doctor:setup_cpu",
}  # fmt: skip

TAKING_OTHERS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of a command that hands options which it does not know to vLLM."""


class LazyCommands(TyperGroup):
    """A command group that imports a command on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, in the order of help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None: there is none."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name].split(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            settings = TAKING_OTHERS if cmd_name == "verify" else None
            found.command(cmd_name, cls=AliasedCommand, context_settings=settings)(function)
        command = typer.main.get_command(found)
        command.name = cmd_name
        return shown_as_written(command)


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Sequoia tree speculative decoding for vLLM.",
)


@app.callback(invoke_without_command=True)
def _global_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Options before the command."""
    if version:
        typer.echo(f"sequoia-vllm {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    with ends_by_signal(), ends_quietly():
        app()
