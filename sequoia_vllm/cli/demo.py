"""``sequoia-vllm demo``: real completions by real vLLM, with trees and without, side by side."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sequoia_vllm.cli.common import console, error_console, fail, print_json

if TYPE_CHECKING:
    from sequoia_vllm.demo.run import DemoSettings, EngineRun

COMPLETION_LINES = 12
MODELS = Path(__file__).parents[2] / "examples" / "models"


def demo(
    target: Annotated[str, typer.Option(help="Target model.")] = str(MODELS / "target"),
    draft: Annotated[str, typer.Option(help="Draft model.")] = str(MODELS / "draft"),
    prompts: Annotated[
        Path, typer.Option(help='Prompts: a .jsonl file with a "prompt" per line.')
    ] = MODELS / "prompts.jsonl",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to use.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per completion.")] = 96,
    tree_size: Annotated[int, typer.Option(min=2, help="Nodes of the tree, with the root.")] = 16,
    tree_depth: Annotated[int, typer.Option(min=1, help="Depth of the tree, in edges.")] = 4,
    chain_length: Annotated[int, typer.Option(min=1, help="Drafts of vLLM's chain.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 makes identical output certain.")] = "float32",
    grow: Annotated[
        int,
        typer.Option(
            min=0,
            help="Layers to add to the target that cost their time and change nothing: the "
            "speeds of a larger target, the output of this one.",
        ),
    ] = 0,
    grow_width: Annotated[int, typer.Option(help="MLP width of the grown target.")] = 4096,
    eager: Annotated[bool, typer.Option(help="Do not compile: starts faster.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Generates the same prompts with plain vLLM, its chain speculation, and Sequoia trees."""
    from sequoia_vllm.demo.grow import grow_target
    from sequoia_vllm.demo.run import DemoSettings, load_prompts

    if not prompts.is_file():
        fail(f"no prompts at {prompts}: run from a checkout, or name files with --target, "
             "--draft and --prompts")  # fmt: skip
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with contextlib.ExitStack() as stack:
        if grow:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sequoia-demo-"))
            target = str(grow_target(Path(target), Path(folder), grow, grow_width))
        _compare(
            DemoSettings(
                target, draft, load_prompts(prompts, num_prompts), max_tokens, tree_size,
                tree_depth, chain_length, batch_size, dtype, eager,
            ),
            as_json,
        )  # fmt: skip


def _compare(settings: DemoSettings, as_json: bool) -> None:
    from sequoia_vllm.demo.run import run_engine, speculative_configs

    runs = []
    for name in speculative_configs(settings):
        with error_console().status(f"{name}: starting the engine and generating"):
            runs.append(run_engine(name, settings))
    identical = [
        [ours == plain for ours, plain in zip(run.token_ids, runs[0].token_ids, strict=True)]
        for run in runs
    ]
    if as_json:
        print_json(
            {
                "runs": [run.to_dict() for run in runs],
                "identical": [all(same) for same in identical],
            }
        )
    else:
        _print(settings.prompts, runs, identical)
    if not all(identical[-1]) and settings.dtype == "float32":
        fail("Sequoia's greedy output differs from plain vLLM's: please report this")


def _print(prompts: tuple[str, ...], runs: list[EngineRun], identical: list[list[bool]]) -> None:
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    out = console()
    plain, sequoia = runs[0], runs[-1]
    completion = "\n".join(sequoia.texts[0].splitlines()[:COMPLETION_LINES])
    out.print(
        Panel(
            f"[dim]{escape(prompts[0][-200:])}[/][bold]{escape(completion)}[/]",
            title="prompt 1 (end), and its completion with Sequoia",
        )
    )
    table = Table(title="Greedy, the same prompts")
    for column in ("engine", "identical to plain", "tokens per step", "tokens/s", "speed"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for run, same in zip(runs, identical, strict=True):
        table.add_row(
            run.name,
            f"{sum(same)} of {len(same)}",
            f"{run.tokens_per_step:.2f}",
            f"{run.tokens_per_second:.0f}",
            f"{run.tokens_per_second / plain.tokens_per_second:.2f}x",
        )
    out.print(table)
    _print_acceptance(sequoia)


def _print_acceptance(run: EngineRun) -> None:
    from rich.table import Table

    stats = run.stats
    assert stats is not None
    table = Table(title="Sequoia: acceptance by depth")
    for column in ("depth", "reached", "accepted", "by child 1, 2, ..."):
        table.add_column(column, justify="right")
    for depth, (offered, accepted) in enumerate(
        zip(stats["offered"], stats["accepted"], strict=True), start=1
    ):
        by_child = ", ".join(
            f"{taken / tried:.2f}" for taken, tried in zip(accepted, offered, strict=True) if tried
        )
        reached = offered[0]
        rate = f"{sum(accepted) / reached:.2f}" if reached else "-"
        table.add_row(str(depth), str(reached), rate, by_child)
    console().print(table)
    seconds, steps = stats["seconds"], max(stats["steps"], 1)
    parts = {name: 1e3 * value / steps for name, value in seconds.items()}
    outside = parts["step"] - parts["target"] - parts["draft"]
    console().print(
        f"One step: {parts['step']:.1f} ms = target forward {parts['target']:.1f} + draft "
        f"forwards {parts['draft']:.1f} + outside both {outside:.1f} ms"
    )
