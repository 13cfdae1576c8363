"""``sequoia-vllm bench``: compares plain vLLM, its chain and Sequoia on this machine."""

from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from sequoia_vllm.bench.measure import BenchSettings, GreedyCheck, Mismatch
from sequoia_vllm.bench.methods import methods, usual_chains
from sequoia_vllm.bench.report import BenchReport, Result, plot_speeds, run_bench
from sequoia_vllm.cli import measuring as shared
from sequoia_vllm.cli.common import console, fail, friendly_errors, new_table, note, print_json
from sequoia_vllm.figures import check_format, require_matplotlib
from sequoia_vllm.hardware.cost import check_batch_sizes
from sequoia_vllm.prompts import describe_prompts, encode_prompts, load_prompts, load_tokenizer

MISMATCH = 1  # exit code
NONE = "none"  # of --chain


def bench(
    target: shared.TargetOption,
    draft: shared.DraftOption = "",
    prompts: shared.PromptsOption = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each round.")] = 4,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,16",
    temperature: Annotated[str, typer.Option(help="Temperatures; 0 is greedy.")] = "0,1",
    trees: Annotated[
        str,
        typer.Option(
            help="Sequoia's trees: served (as a server with --speculative-config sequoia runs: "
            "its tree, adapting), drawn (without retrieval), lookup (without a draft), traversal "
            "(verified by it), dynamic (dynamic trees), auto (may choose none), 16x4 (16 nodes, at "
            "most 4 deep), a name in the library, or a tree file."
        ),
    ] = "served",
    chain: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="vLLM's own chains, the fastest of which is marked. 2,4: chains of 2 and of 4 "
            "drafts with vLLM's defaults; 4:probabilistic or 4:probabilistic:block: with this "
            "sampling; 4/2@9: 2 drafts from 9 requests at once; 4:ngram or 15:suffix: without a "
            "draft; 7:adaptive: vLLM's adaptive verification of DSpark heads; 4:full: with full "
            "CUDA graphs, beside plain vLLM with them; none: no chain. Default: 1,2,4; "
            "probabilistic on GPUs if a temperature is above 0.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of every completion.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    dtype: shared.DtypeOption = "auto",
    tensor_parallel_size: shared.TensorParallelOption = 1,
    eager: shared.EagerOption = False,
    kv_cache_gib: shared.CacheOption = 1.0,
    offload_directory: shared.OffloadDirectoryOption = None,
    offload_memory_gib: shared.OffloadMemoryOption = 0.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the JSON.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw tokens/s of a request by batch size to this file (.svg, .png or .pdf)."
        ),
    ] = None,
    as_json: shared.JsonOption = False,
) -> None:
    """Compare plain vLLM, its own chain speculation, and Sequoia, in alternating rounds.

    Rates are of steps in which the whole batch decodes. Greedy outputs must equal plain vLLM's. In
    float32 every difference is an error (exit code 1). In half precision a difference is an error
    if rounding cannot explain it: some later token is further below the target's best one than two
    units in the last place of a logit.
    """
    shared.quiet_engines()
    with friendly_errors():
        draft = draft or shared.draft_to_measure(target)
    options = dict(locals())
    shared.check_output("--output", output)
    with friendly_errors():
        if plot is not None:
            shared.check_output("--plot", plot)
            check_format(plot)
            require_matplotlib()
        compared = _compared(options)
        chosen = load_prompts(prompts, num_prompts)
        shared.check_models(target, draft)
        if chain is None:  # asks vLLM for its platform, so it comes after all checks
            options["chain"] = ",".join(usual_chains(draft, compared["temperatures"]))
            compared = _compared(options)
        encoded = tuple(encode_prompts(chosen, load_tokenizer(target)))
        settings = BenchSettings(shared.engine_spec(options), prompts=encoded, **compared)
        with shared.measuring("bench:", "interrupted: nothing was kept") as progress:
            described = _described(options, describe_prompts(prompts, chosen))
            report = run_bench(settings, described, progress)
    if output is not None:
        report.save(output)
    if plot is not None:
        plot_speeds(report, plot)
        note(f"drawn to {plot}")
    if as_json:
        print_json(report.to_dict())
    else:
        print_report(report)
    if report.greedy is not None and not report.greedy.passed:
        wrong = next(m for m in report.greedy.mismatches if not m.near_tie)
        fail(f"greedy output differs from plain vLLM's: {_described_mismatch(wrong)}", MISMATCH)


def _compared(options: dict[str, Any]) -> dict[str, Any]:
    """What the options compare: fields of `BenchSettings`. It loads nothing, so typos end here."""
    sizes = check_batch_sizes(shared.numbers("--batch-sizes", options["batch_sizes"]))
    chains = [] if options["chain"] in (None, NONE) else options["chain"].split(",")
    trees = [tree.strip() for tree in options["trees"].split(",")]
    return {
        "temperatures": _temperatures(options["temperature"]),
        "batch_sizes": tuple(sizes),
        "methods": tuple(methods(options["draft"], chains, trees)),
        **{name: options[name] for name in ("max_tokens", "rounds")},
    }


def _described(options: dict[str, Any], prompts: dict[str, str]) -> dict[str, Any]:
    """The settings for the report, with the prompts' name and hash instead of their path."""
    shown = (
        "num_prompts", "batch_sizes", "temperature", "trees", "chain", "max_tokens",
        "rounds", "dtype", "tensor_parallel_size", "eager", "kv_cache_gib", "offload_memory_gib",
    )  # fmt: skip
    return {
        **{name: options[name] for name in shown},
        "offload": "disk" if options["offload_directory"] else None,
        **prompts,
    }


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= value < float("inf") for value in found):
        fail(f"--temperature {text!r}: give numbers from 0 up separated by commas, like 0,1")
    return found


def print_report(report: BenchReport) -> None:
    """Prints speeds, time splits, the greedy check, and all remarks."""
    out = console()
    out.print(
        f"{report.target.name} with {report.draft.name}, {report.dtype}, on {report.device}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    out.print(speeds_table(report.results))
    out.print(_splits(report.results))
    if report.greedy is not None:
        print_check(report.greedy)
    said = [one.note for one in report.results if one.note and not one.is_plain]
    for line in dict.fromkeys([*said, *report.notes]):
        mark = "*" if line in said else "note:"
        out.print(f"{mark} {line}", markup=False, highlight=False, soft_wrap=True)


def print_check(check: GreedyCheck) -> None:
    """Prints how many greedy outputs were plain vLLM's, and where others differ."""
    out = console()
    out.print(f"Greedy output identical to plain vLLM's: {check.identical} of {check.compared}")
    for mismatch in check.mismatches:
        near = f"a near-tie (within {check.bound} nats)"
        verdict = near if mismatch.near_tie else "an error"
        words = f"  {_described_mismatch(mismatch)}: {verdict}"
        out.print(words, highlight=False, soft_wrap=True)


def speeds_table(results: list[Result]) -> Table:
    """Speeds by temperature, batch size and method, with marks."""
    table = new_table(
        "T", "batch", "method", "tokens/s", "speed", "tokens per step", "step ms",
        left=["method"], title="Speed of decoding: medians of rounds (lowest to highest)",
        caption="+ vLLM's best chain here; = plain: nothing was drafted, but for probes; * below",
    )  # fmt: skip
    for _, group in groupby(results, key=lambda result: (result.temperature, result.batch_size)):
        for number, result in enumerate(group):
            marks = (" +" if result.best_chain else "") + (
                " *" if result.note and not result.is_plain else ""
            )
            table.add_row(
                *(("", "") if number else (f"{result.temperature:g}", str(result.batch_size))),
                escape(result.method) + marks,
                f"{result.tokens_per_second.median:.1f}",
                result.speed_in_words,
                f"{result.tokens_per_step:.2f}",
                f"{1e3 * result.step_seconds:.2f}",
            )
        table.add_section()
    return table


def _splits(results: list[Result]) -> Table:
    parts = ("target", "draft", "drawing", "verify", "other")
    table = new_table(
        "T", "batch", "method", *parts, "outside models", left=["method"],
        title="A step's time, milliseconds",
    )  # fmt: skip
    for result in results:
        table.add_row(
            f"{result.temperature:g}", str(result.batch_size), escape(result.method),
            *(f"{1e3 * getattr(result.split, part):.2f}" for part in parts),
            f"{result.split.outside / result.step_seconds:.1%}",
        )  # fmt: skip
    return table


def _described_mismatch(mismatch: Mismatch) -> str:
    gap = "" if mismatch.gap is None else f", up to {mismatch.gap:.3g} nats below the best"
    return (
        f"{mismatch.method}, batch {mismatch.batch_size}, prompt {mismatch.prompt + 1}: differs "
        f"after {mismatch.position} tokens ({mismatch.token}, not {mismatch.plain_token}){gap}"
    )
