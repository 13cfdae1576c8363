"""Commands that went, and what to type instead."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from sequoia_vllm.cli.common import fail

REMOVED: dict[str, str] = {
    "calibrate": "sequoia-vllm tune --only acceptance",
    "grow": "python -m benchmarks.synthetic_target, in a checkout of the repository",
    "profile": "sequoia-vllm tune --only times",
    "tree bench": "python -m benchmarks.optimizer, in a checkout of the repository",
    "tree generate": "python -m benchmarks.generate_trees, in a checkout of the repository",
    "tree paper": "python -m benchmarks.paper, in a checkout of the repository",
    "tree roofline": "python -m benchmarks.roofline, in a checkout of the repository",
    "tree scaling": "python -m benchmarks.scaling, in a checkout of the repository",
}
"""A removed command without ``sequoia-vllm``, like ``tree generate``: its replacement."""


class GroupWithRemoved(TyperGroup):
    """A command group that names the replacement of a command in `REMOVED`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command as typer does; exits with code 2 if it was removed."""
        group = [] if ctx.parent is None else [ctx.info_name]
        name = " ".join([*group, *args[:1]])
        if name in REMOVED:
            fail(f"there is no command {name!r} any more: use {REMOVED[name]}")
        return super().resolve_command(ctx, args)
