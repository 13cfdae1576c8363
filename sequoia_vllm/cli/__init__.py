"""The ``sequoia-vllm`` command.

Each command has a module of its own, imported only when called: ``sequoia-vllm tree ...`` never
loads torch or vLLM. Modules that need these import them inside functions, so ``--help`` is quick.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sequoia_vllm import __version__
from sequoia_vllm.cli.common import ends_quietly
from sequoia_vllm.cli.shown_help import AliasedCommand, shown_as_written

# name -> "module:attribute"; the attribute is a typer app or a plain function.
COMMANDS = {
    "advise": "sequoia_vllm.cli.advise:advise",
    "tree": "sequoia_vllm.cli.tree.commands:app",
    "tune": "sequoia_vllm.cli.tune:tune",
    "bench": "sequoia_vllm.cli.bench:bench",
    "gpu-check": "sequoia_vllm.cli.gpu_check:gpu_check",
    "demo": "sequoia_vllm.cli.demo:demo",
    "doctor": "sequoia_vllm.cli.doctor:doctor",
    "setup-cpu": "sequoia_vllm.cli.setup_cpu:setup_cpu",
}


_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes


class LazyCommands(TyperGroup):
    """A command group that imports a command on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Commands whose module is installed."""
        modules = {name: target.split(":")[0] for name, target in COMMANDS.items()}
        return [name for name, module in modules.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name; None: there is none."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module, attribute = COMMANDS[cmd_name].split(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(cmd_name, cls=AliasedCommand)(function)
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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sequoia-vllm {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Entry point of the console script."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # while no engine runs they end it at once
    try:
        with ends_quietly():
            app()
    except BaseException as ended:
        # Python would first wait for threads, and an interrupted clean-up may end in any error.
        if (code := _interrupted(ended)) is not None:
            sys.stderr.flush()
            os._exit(code)
        raise


def _interrupted(ended: BaseException) -> int | None:
    """The exit code of a command that a signal has ended; None: none has."""
    if isinstance(ended, SystemExit) and ended.code in _INTERRUPTED:
        return int(ended.code)
    interrupts = sys.modules.get("sequoia_vllm.measuring.interrupts")
    number = None if interrupts is None else interrupts.interrupted_by()
    return None if number is None else 128 + int(number)
