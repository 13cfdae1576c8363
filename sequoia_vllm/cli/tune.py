"""``sequoia-vllm tune``: the best tree for a model pair on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sequoia_vllm.cli.common import fail, friendly_errors, print_json
from sequoia_vllm.cli.measuring import (
    CacheOption,
    DraftOption,
    DtypeOption,
    EagerOption,
    JsonOption,
    OffloadDirectoryOption,
    OffloadMemoryOption,
    PromptsOption,
    TargetOption,
    check_models,
    draft_to_measure,
    engine_spec,
    note_synthetic,
    numbers,
    quiet_engines,
)
from sequoia_vllm.cli.tune_steps import print_report, tune_pair
from sequoia_vllm.hardware.cost import check_batch_sizes

if TYPE_CHECKING:
    from sequoia_vllm.calibration.acceptance_task import AcceptanceSettings
    from sequoia_vllm.calibration.measure_profile import ProfileSettings


@dataclass(frozen=True)
class Budget:
    """How much to measure unless options say otherwise."""

    precision: float = 0.02
    """Count until no entry's 95 % half-width, times the share of trees that reach its depth, is
    above this."""
    max_tokens_total: int = 100_000
    branch: int = 10
    depth: int = 5
    counted: int = 128
    """Tokens per completion for counting acceptance. Few tokens of many prompts tell more than many
    tokens of few, as acceptance varies most between prompts."""
    batch_sizes: str = "1,2,4,8"
    tokens: str = "1,2,3,4,5,6,8,12,16,32,64"
    context: str = "512"
    timed: int = 32  # tokens per completion for timing steps
    rounds: int = 3
    enough_seconds: float | None = None  # see `ProfileSettings`


FULL = Budget()
QUICK = Budget(0.07, 4_000, 4, 3, 32, "1,4", "1,2,4,8,16,32", "128", 24, 2, 60)
# Passes that wait for weights make larger trees pay; few small ones need timing.
OFFLOADED, OFFLOADED_QUICK = "1,8,16,32,48,64,96,128", "1,16,32,64,128"
COUNTING, TIMING = "Counting accepted drafts", "Timing steps"


def _budgeted(panel: str, field: str, explained: str, **checks: Any) -> Any:
    """An option whose default is a field of the `Budget`."""
    # No square brackets: rich takes them for markup.
    default = f"Default {getattr(FULL, field)}, with --quick {getattr(QUICK, field)}."
    return typer.Option(
        help=f"{explained} {default}", show_default=False, rich_help_panel=panel, **checks
    )


def tune(
    target: TargetOption,
    draft: DraftOption = "",
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, and less exactly.")] = False,
    prompts: PromptsOption = None,
    temperature: Annotated[float, typer.Option(
        min=0, help="Temperature of every request; 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(
        min=1e-6, max=1, help="Top-p of every request; 1: off.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=8, show_default=False, help=
        f"Tokens per completion. Default {FULL.counted} to count, {FULL.timed} to time; with "
        f"--quick {QUICK.counted} and {QUICK.timed}.")] = None,
    max_tokens_total: Annotated[int | None, _budgeted(
        COUNTING, "max_tokens_total", "Stop when so many tokens were generated.", min=1)] = None,
    batch_sizes: Annotated[str | None, _budgeted(
        TIMING, "batch_sizes", "Batch sizes; the schedule reaches to the largest.")] = None,
    tokens: Annotated[str | None, _budgeted(
        TIMING, "tokens", "Tree sizes, root included; no larger tree is chosen. Sizes that "
        "cannot win are left out. With --offload-directory the default is "
        f"{OFFLOADED} or {OFFLOADED_QUICK}.")] = None,
    context: Annotated[str | None, _budgeted(
        TIMING, "context", "Tokens of context of each request. Of several, like 256,1024, the "
        "tree is chosen for the first.")] = None,
    dtype: DtypeOption = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(
        min=1, help="Devices the target is split over.")] = 1,
    eager: EagerOption = False,
    kv_cache_gib: CacheOption = 1.0,
    offload_directory: OffloadDirectoryOption = None,
    offload_memory_gib: OffloadMemoryOption = 0.0,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Measure, choose the best tree for each batch size, and keep it for `"tree": "auto"`.

    Live engines count how often drafts are accepted, then time the parts of a
    step. The tree lies in the user's tree directory ($SEQUOIA_VLLM_TREES), with
    both measurements beside it, and is for exactly this device, pair and dtype.
    """
    quiet_engines()
    with friendly_errors():
        draft = draft or draft_to_measure(target)
    options = dict(locals())
    with friendly_errors():
        check_models(target, draft)
        note_synthetic(target, draft)
        report = tune_pair(*_settings(options))
        print_json(report) if as_json else print_report(report)


def _settings(options: dict[str, Any]) -> tuple[AcceptanceSettings, ProfileSettings]:
    from sequoia_vllm.calibration.acceptance_task import AcceptanceSettings
    from sequoia_vllm.calibration.measure_profile import ProfileSettings
    from sequoia_vllm.calibration.tuned_tree import quick_engine

    quick, eager = options["quick"], options["eager"]
    budget = QUICK if quick else FULL
    if options["offload_directory"] is not None:
        budget = replace(budget, tokens=OFFLOADED_QUICK if quick else OFFLOADED)
    names = ("max_tokens_total", "batch_sizes", "tokens", "context")
    given = {name: options[name] for name in names if options[name] is not None}
    if options["max_tokens"] is not None:
        given |= dict.fromkeys(("counted", "timed"), options["max_tokens"])
    budget = replace(budget, **given)
    sizes = check_batch_sizes(list(numbers("--batch-sizes", budget.batch_sizes)))
    contexts = numbers("--context", budget.context)
    if min(contexts) < 1:
        fail(f"--context {budget.context}: give at least 1")
    engine = engine_spec(options)
    prompts, temperature = options["prompts"], options["temperature"]
    counting = AcceptanceSettings(
        # Compilation does not change acceptance, and may take longer than the counting.
        replace(engine, enforce_eager=eager or quick),
        prompts=prompts, temperature=temperature, top_p=options["top_p"], branch=budget.branch,
        depth=budget.depth, max_tokens=budget.counted, precision=budget.precision,
        max_tokens_total=budget.max_tokens_total,
    )  # fmt: skip
    if quick:
        engine = quick_engine(engine)
    timing = ProfileSettings(
        engine, prompts=prompts, tokens=numbers("--tokens", budget.tokens), contexts=contexts,
        batch_sizes=tuple(sizes), max_tokens=budget.timed, rounds=budget.rounds,
        temperature=temperature, enough_seconds=budget.enough_seconds,
    )  # fmt: skip
    return counting, timing
