"""``sequoia-vllm demo``: real completions by real vLLM, with trees and without, side by side."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sequoia_vllm.cli.common import (
    console,
    fail,
    friendly_errors,
    note,
    print_json,
)
from sequoia_vllm.cli.measuring import (
    DraftOption,
    TargetOption,
    check_models,
    measuring,
    quiet_engines,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.panel import Panel

    from sequoia_vllm.bench.measure import MethodRuns
    from sequoia_vllm.bench.report import Result, Spread
    from sequoia_vllm.bench.rounds import BenchSettings

COMPLETION_LINES = 12

_ROUNDS = 3
_PACKAGE = Path(__file__).parents[1]


def shipped_models(package: Path = _PACKAGE) -> Path:
    """Finds the demo's pair: inside the package, or beside it in a checkout."""
    inside = package / "examples" / "models"
    return inside if inside.is_dir() else package.parent / "examples" / "models"


MODELS = shipped_models()


def demo(
    target: TargetOption = str(MODELS / "target"),
    draft: DraftOption = str(MODELS / "draft"),
    prompts: Annotated[
        Path, typer.Option(help='Prompts: a .jsonl file with a "prompt" per line.')
    ] = MODELS / "prompts.jsonl",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to use.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per completion.")] = 96,
    tree_size: Annotated[int, typer.Option(min=2, help="Nodes of the tree, with the root.")] = 16,
    tree_depth: Annotated[int, typer.Option(min=1, help="Depth of the tree, in edges.")] = 4,
    chain_length: Annotated[
        int,
        typer.Option(
            min=1, help="Drafts of vLLM's chain: as given, not its best; bench looks for that."
        ),
    ] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 makes identical output certain.")] = "float32",
    synthetic_layers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Layers to add to the target that cost their time and change nothing: the "
            "speeds of a larger target, the output of this one. In a checkout only.",
        ),
    ] = 0,
    synthetic_width: Annotated[
        int, typer.Option(min=1, help="MLP width of this synthetic target.")
    ] = 4096,
    eager: Annotated[bool, typer.Option(help="Do not compile: starts faster.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Generate the same prompts with plain vLLM, its chain speculation, and Sequoia trees."""
    if not prompts.is_file():
        fail(f"no prompts at {prompts}: name files with --model, --draft-model and --prompts")
    from sequoia_vllm.measuring.engine_processes import sigterm_raises

    quiet_engines()
    with contextlib.ExitStack() as stack:
        stack.enter_context(friendly_errors())
        check_models(target, draft)
        if synthetic_layers:
            stack.enter_context(sigterm_raises())
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sequoia-demo-"))
            sizes = synthetic_layers, synthetic_width
            target = _synthetic(target, Path(folder) / "target", *sizes, dtype)
        from sequoia_vllm.bench.methods import chain, plain, sequoia
        from sequoia_vllm.bench.rounds import BenchSettings
        from sequoia_vllm.measuring.engines import EngineSpec
        from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

        texts = load_prompts(prompts, num_prompts)
        settings = BenchSettings(
            EngineSpec(target, draft, dtype=dtype, enforce_eager=eager, kv_cache_gib=0.5),
            methods=(
                plain(), chain(draft, chain_length), sequoia(draft, f"{tree_size}x{tree_depth}")
            ),
            prompts=tuple(encode_prompts(texts, load_tokenizer(target))),
            batch_sizes=(batch_size,),
            max_tokens=max_tokens,
            rounds=_ROUNDS,
        )  # fmt: skip
        _compare(settings, texts[0].prompt or "", as_json)


def _synthetic(target: str, folder: Path, layers: int, width: int, dtype: str) -> str:
    from sequoia_vllm.measuring.engines import load_config
    from sequoia_vllm.measuring.synthetic_target import make_synthetic_target

    config = load_config(target)
    sizes = {
        "--layers": config.num_hidden_layers + layers,
        "--width": max(width, config.intermediate_size),
        "--dtype": dtype,
    }
    words = [word for option, size in sizes.items() for word in (option, str(size))]
    return str(make_synthetic_target(target, folder, *words)["folder"])


def _compare(settings: BenchSettings, prompt: str, as_json: bool) -> None:
    from sequoia_vllm.bench.measure import measure
    from sequoia_vllm.bench.report import MOST_SPREAD
    from sequoia_vllm.bench.run import results
    from sequoia_vllm.measuring.provenance import provenance

    with measuring("demo:", "interrupted") as report:
        found = measure(settings, report)
    (runs,) = found.runs.values()
    shown = results(found, lambda *_: None, chain_is_wrong=False)
    identical = [_identical(one, runs[0]) for one in runs]
    said = summary(shown[-1], settings.rounds, all(identical[-1]), found.dtype)
    if as_json:
        stated = provenance()
        print_json(
            {
                "summary": said,
                "speedup": shown[-1].speedup.to_dict(),
                "device": stated["device"],
                "versions": stated["versions"],
                "runs": [_as_dict(*one) for one in zip(runs, shown, strict=True)],
                "identical": [all(same) for same in identical],
            }
        )
    else:
        _print(prompt, runs, shown, identical)
    if disturbed := disagreeing(shown):
        note(
            f"rounds disagree by more than {MOST_SPREAD - 1:.0%} ({', '.join(disturbed)}): "
            "something else ran on this machine; repeat the demo when it is quiet"
        )
    if not as_json:
        console().print(said, soft_wrap=True)
    if not all(identical[-1]) and found.dtype == "float32":
        fail("Sequoia's greedy output differs from plain vLLM's: please report this", code=1)


def _identical(runs: MethodRuns, plain: MethodRuns) -> list[bool]:
    """Whether a prompt's output is plain vLLM's in every round."""
    expected = plain.rounds[0].token_ids
    return [
        all(one.token_ids[prompt] == tokens for one in runs.rounds)
        for prompt, tokens in enumerate(expected)
    ]


def disagreeing(results: Sequence[Result]) -> list[str]:
    """Methods whose speedup differs too much between rounds, with its range."""
    return [f"{one.method}: {_range(one.speedup)}" for one in results if one.speedup.disagrees]


def summary(sequoia: Result, rounds: int, identical: bool, dtype: str) -> str:
    """Says in one sentence what Sequoia gained here, and whether its output is the same."""
    speedup = sequoia.speedup
    gain = f"{speedup.median:.2f}x as fast as plain vLLM ({_range(speedup)} in {rounds} rounds)"
    slower = ", which is slower" if speedup.median < 1 else ""
    if identical:
        output = "is identical to plain vLLM's, token for token"
    elif dtype == "float32":
        output = "differs from plain vLLM's, which is an error"
    else:
        output = f"differs from plain vLLM's, as rounding in {dtype} allows"
    return f"On this machine Sequoia was {gain}{slower}, and its greedy output {output}."


def _range(speedup: Spread) -> str:
    return f"{speedup.low:.2f}x to {speedup.high:.2f}x"


def _as_dict(runs: MethodRuns, result: Result) -> dict[str, Any]:
    last = runs.rounds[-1]
    return {
        "name": result.method,
        "texts": last.texts,
        "token_ids": last.token_ids,
        "tokens_per_second": result.tokens_per_second.to_dict(),
        "speedup": result.speedup.to_dict(),
        "tokens_per_step": result.tokens_per_step,
        "stats": last.counters,
    }


def shown_completion(prompt: str, text: str) -> Panel:
    """Shows the end of a prompt and the first lines of its completion, as wide as these are."""
    from rich.markup import escape
    from rich.panel import Panel

    completion = "\n".join(text.splitlines()[:COMPLETION_LINES])
    return Panel.fit(
        f"[dim]{escape(prompt[-200:])}[/][bold]{escape(completion)}[/]",
        title="prompt 1 (end), and its completion with Sequoia",
    )


def _print(
    prompt: str, runs: list[MethodRuns], results: list[Result], identical: list[list[bool]]
) -> None:
    from rich.table import Table

    out = console()
    sequoia = runs[-1].rounds[-1]
    out.print(shown_completion(prompt, sequoia.texts[0]))
    table = Table(
        title=f"Greedy, the same prompts; median and range of {len(runs[0].rounds)} rounds",
        caption="the chain's length is given: bench finds vLLM's best",
    )
    for column in ("engine", "identical to plain", "tokens per step", "tokens/s", "speed"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for one, same in zip(results, identical, strict=True):
        table.add_row(
            one.method,
            f"{sum(same)} of {len(same)}",
            f"{one.tokens_per_step:.2f}",
            f"{one.tokens_per_second.median:.0f}",
            f"{one.speedup.median:.2f}x ({_range(one.speedup)})",
        )
    out.print(table)
    assert sequoia.counters is not None
    _print_acceptance(sequoia.counters)
    _print_step(results[-1])


def _print_acceptance(stats: dict[str, Any]) -> None:
    from rich.table import Table

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


def _print_step(result: Result) -> None:
    parts = result.split
    console().print(
        f"One step: {1e3 * result.step_seconds:.1f} ms = target forward {1e3 * parts.target:.1f} + "
        f"draft forwards {1e3 * parts.draft:.1f} + outside both {1e3 * parts.outside:.1f} ms"
    )
