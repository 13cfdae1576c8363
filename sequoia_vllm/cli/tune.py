"""``sequoia-vllm tune``: the best tree for a model pair on this machine."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from sequoia_vllm.calibration.measure_acceptance import (
    AcceptanceSettings,
    measure_acceptance,
    tokens_margin,
)
from sequoia_vllm.calibration.measure_profile import ProfileSettings, checked, measure_profile
from sequoia_vllm.cli import measuring as shared
from sequoia_vllm.cli.common import console, fail, friendly_errors, new_table, note, print_json
from sequoia_vllm.cli.tree import plot_tree
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.drafters.registry import draft_option, drafter
from sequoia_vllm.engine.compat.contract import current_device
from sequoia_vllm.engine.frontend.tree_choice import Facts, choose_engine_tree, look_up
from sequoia_vllm.errors import CalibrationError
from sequoia_vllm.figures import FigureError
from sequoia_vllm.hardware.choose import choose_schedule
from sequoia_vllm.hardware.cost import check_batch_sizes
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile, TreeEntry
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.selection import make_entry, model_class_of, profile_reference
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.library.user_files import make_writable
from sequoia_vllm.measuring.engines import EngineSpec, count_parameters
from sequoia_vllm.measuring.provenance import synthetic_models
from sequoia_vllm.tree import Acceptance

# How much to measure unless options say otherwise. Tokens per completion, to count and to time: as
# acceptance varies most between prompts, few tokens of many prompts tell more.
FULL = {
    "max_tokens_total": 100_000, "counted": 128, "timed": 32, "batch_sizes": "1,2,4,8",
    "tokens": "1,2,3,4,5,6,8,12,16,32,64", "context": "512",
}  # fmt: skip
QUICK = {
    "max_tokens_total": 4_000, "counted": 32, "timed": 24, "batch_sizes": "1,4",
    "tokens": "1,2,4,8,16,32", "context": "128",
}  # fmt: skip
QUICK_COUNTING: dict[str, Any] = {"precision": 0.07, "branch": 4, "depth": 3}
QUICK_TIMING: dict[str, Any] = {"rounds": 2, "enough_seconds": 60}
# Passes that wait for weights make larger trees pay; few small ones need timing.
OFFLOADED, OFFLOADED_QUICK = "1,8,16,32,48,64,96,128", "1,16,32,64,128"
_LARGE_ON_CPU = 2e8  # parameters
COUNTING, TIMING = "Counting accepted drafts", "Timing steps"


def _budgeted(panel: str, field: str, explained: str, **checks: Any) -> Any:
    """An option whose default is in `FULL` and `QUICK`."""
    # No square brackets: rich takes them for markup.
    default = f"Default {FULL[field]}, with --quick {QUICK[field]}."
    return typer.Option(
        help=f"{explained} {default}", show_default=False, rich_help_panel=panel, **checks
    )


def tune(
    target: shared.TargetOption,
    draft: shared.DraftOption = "",
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, and less exactly.")] = False,
    prompts: shared.PromptsOption = None,
    temperature: Annotated[float, typer.Option(
        min=0, help="Temperature of every request; 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(
        min=1e-6, max=1, help="Top-p of every request; 1: off.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=8, show_default=False, help=
        f"Tokens per completion. Default {FULL['counted']} to count, {FULL['timed']} to time; with "
        f"--quick {QUICK['counted']} and {QUICK['timed']}.")] = None,
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
    dtype: shared.DtypeOption = "auto",
    tensor_parallel_size: shared.TensorParallelOption = 1,
    eager: shared.EagerOption = False,
    kv_cache_gib: shared.CacheOption = 1.0,
    offload_directory: shared.OffloadDirectoryOption = None,
    offload_memory_gib: shared.OffloadMemoryOption = 0.0,
    as_json: shared.JsonOption = False,
) -> None:  # fmt: skip
    """Measure, choose the best tree for each batch size, and keep it for `"tree": "auto"`.

    Live engines count how often drafts are accepted, then time the parts of a
    step. The tree lies in the user's tree directory ($SEQUOIA_VLLM_TREES), with
    both measurements beside it, and is for exactly this device, pair and dtype.
    """
    shared.quiet_engines()
    with friendly_errors():
        draft = draft or shared.draft_to_measure(target)
    options = dict(locals())
    with friendly_errors():
        shared.check_models(target, draft)
        for role, origin in synthetic_models(target, draft).items():
            # Nobody shall take its times for a real one's.
            note(
                f"the {role} is a synthetic target: it computes what {origin.get('from')} does, at "
                f"the cost of {origin.get('parameters', 0) / 1e6:.0f} million parameters"
            )
        report = tune_pair(*_settings(options))
        print_json(report) if as_json else print_report(report)


def _settings(options: dict[str, Any]) -> tuple[AcceptanceSettings, ProfileSettings]:
    quick, eager = options["quick"], options["eager"]
    budget: dict[str, Any] = dict(QUICK if quick else FULL)
    if options["offload_directory"] is not None:
        budget["tokens"] = OFFLOADED_QUICK if quick else OFFLOADED
    budget |= {name: options[name] for name in budget.keys() & options if options[name] is not None}
    if options["max_tokens"] is not None:
        budget |= dict.fromkeys(("counted", "timed"), options["max_tokens"])
    sizes = check_batch_sizes(shared.numbers("--batch-sizes", budget["batch_sizes"]))
    contexts = shared.numbers("--context", budget["context"])
    if min(contexts) < 1:
        fail(f"--context {budget['context']}: give at least 1")
    engine = shared.engine_spec(options)
    asked = {name: options[name] for name in ("prompts", "temperature")}
    counting = AcceptanceSettings(
        # Compilation does not change acceptance, and may take longer than the counting.
        replace(engine, enforce_eager=eager or quick), **asked, top_p=options["top_p"],
        max_tokens=budget["counted"], max_tokens_total=budget["max_tokens_total"],
        **(QUICK_COUNTING if quick else {}),
    )  # fmt: skip
    timing = ProfileSettings(
        quick_engine(engine) if quick else engine, **asked, contexts=contexts,
        tokens=shared.numbers("--tokens", budget["tokens"]), batch_sizes=tuple(sizes),
        max_tokens=budget["timed"], **(QUICK_TIMING if quick else {}),
    )  # fmt: skip
    return counting, timing


_INTERRUPTED = "interrupted: no tree was chosen"
_STOPPED_BY = {
    "precision": "the precision asked for was reached",
    "tokens": "--max-tokens-total was reached first",
    "prompts": "all greedy completions are at their end: more prompts, or a larger --max-tokens, "
    "would say more",
}


def count(settings: AcceptanceSettings, stage: str) -> AcceptanceFile:
    """Measures acceptance, and notes how far it got; ``stage`` begins the progress line."""
    with shared.measuring(f"{stage}acceptance:", _INTERRUPTED) as report:
        measured = measure_acceptance(settings, report)
    counts = measured.calibration
    assert counts is not None
    note(f"{counts.trees} trees, {counts.tokens} tokens, acceptance known within "
         f"{counts.precision:.4f}: {_STOPPED_BY[counts.stopped_by]}")  # fmt: skip
    return measured


def time_steps(settings: ProfileSettings, vectors: Sequence[Acceptance], stage: str) -> Profile:
    """Measures a profile; see `measure_profile` and `count`."""
    with shared.measuring(f"{stage}profile:", _INTERRUPTED) as report:
        return measure_profile(settings, report, vectors)


def tune_pair(counting: AcceptanceSettings, timing: ProfileSettings) -> dict[str, Any]:
    """Measures acceptance and times, then chooses and saves the tree; returns the report."""
    timing = checked(timing)  # before anything is counted
    engine, context, largest = timing.engine, timing.contexts[0], max(timing.tokens)
    library, pair = TreeLibrary(), pair_here(engine)
    files = library.measurements(pair)
    make_writable(files.directory)  # fails now instead of after measuring
    vector = count(counting, "1 of 2, then profile: ")
    vector.save(files.acceptance)
    times = time_steps(timing, [vector.vector], "2 of 2: ")
    times.save(files.profile)
    entry = tuned_entry(vector, times, context, largest)
    path = library.save_user_tree(pair, entry)
    picture, title = files.directory / "tree.svg", f"{pair.target} with {engine.draft}"
    picture.unlink(missing_ok=True)
    with suppress(FigureError):  # matplotlib is an extra
        plot_tree(entry.tree, vector.vector, title, picture)
    config: dict[str, Any] = {"method": "sequoia", **draft_option(engine.draft), "tree": "auto"}
    if engine.offload is not None:
        config["offload"] = engine.offload.model_dump(mode="json", exclude_defaults=True)
    asked = SequoiaConfig.parse({**draft_option(engine.draft), "tree": "auto"})
    facts = Facts(pair, drafter("model"), library=look_up(asked, pair))
    keys = ("device", "target", "dtype", "tensor_parallel_size")
    return {
        **{key: getattr(pair, key) for key in keys},
        "draft": engine.draft,
        "context_length": context,
        "speculates": entry.tree.size > 1,
        "tree": {"size": entry.tree.size, "depth": entry.tree.depth},
        "schedule": [list(row) for row in entry.schedule],
        "estimates": [estimate.to_dict() for estimate in entry.estimates],
        "tokens_margins": [
            None if one is None else round(one, 4) for one in margins(entry, vector)
        ],
        "file": str(path),
        "measurements": str(files.directory),
        "picture": str(picture) if picture.exists() else None,
        "now_used": choose_engine_tree(asked, facts).source,  # what an engine with this pair gets
        "command": f"vllm serve {pair.target} --speculative-config '{json.dumps(config)}'",
    }


def pair_here(engine: EngineSpec) -> PairKey:
    """The key with which such an engine looks up its tree on this machine. A layer of the target's
    own checkpoint goes by the target's name there.
    It refuses a target whose configuration vLLM cannot read."""
    from vllm.engine.arg_utils import EngineArgs

    from sequoia_vllm.engine.common.cluster import current_device_name

    try:
        config = EngineArgs(model=engine.target, dtype=engine.dtype).create_model_config()
    except (ValueError, OSError) as error:
        raise CalibrationError(f"vLLM cannot use the target {engine.target!r}: {error}") from error
    dtype = str(config.dtype).removeprefix("torch.")
    draft = engine.target if shared.is_targets_own(engine.draft) else engine.draft
    return PairKey(
        current_device_name(), engine.target, draft, dtype, engine.tensor_parallel_size,
        engine.offload.name if engine.offload else None,
    )  # fmt: skip


def quick_engine(engine: EngineSpec) -> EngineSpec:
    """Turns compilation off on CPUs with a large target: it hardly changes such steps, which read
    weights, and takes minutes. It refuses a target that transformers does not know."""
    is_large = current_device() == "cpu" and count_parameters(engine.target) >= _LARGE_ON_CPU
    return replace(engine, enforce_eager=engine.enforce_eager or is_large)


def tuned_entry(
    vector: AcceptanceFile, profile: Profile, context_length: int, max_size: int
) -> TreeEntry:
    """The fastest tree and schedule by these measurements; a tree of size 1: do not speculate."""
    largest_batch = max(curve.batch_size for curve in profile.target_forward)
    schedule = choose_schedule(
        vector.vector,
        profile,
        batch_sizes=range(1, largest_batch + 1),
        max_size=max_size,
        context_length=context_length,
    )
    reference = profile_reference(profile).model_copy(update={"context_length": context_length})
    return make_entry("user", model_class_of(profile), profile, reference, vector, schedule)


def margins(entry: TreeEntry, vector: AcceptanceFile) -> list[float | None]:
    """`tokens_margin` of each estimate's tokens per step; None: not known."""
    if vector.trials is None:
        return [None] * len(entry.estimates)
    trials = np.atleast_2d(np.asarray(vector.trials)).tolist()
    trees = (entry.tree.trim(one.num_speculative_tokens + 1) for one in entry.estimates)
    return [tokens_margin(tree, vector.vector, trials) for tree in trees]


def print_report(report: dict[str, Any]) -> None:
    """Prints the report of `tune_pair`."""
    plain: Any = {"soft_wrap": True, "markup": False, "highlight": False}
    console().print(
        f"{Path(report['target']).name} with {Path(report['draft']).name}, {report['dtype']}, "
        f"{report['context_length']} tokens of context; expected from what was measured:",
        **plain,
    )
    table = new_table("batch", "drafts per request", "tokens per step", "speedup")
    margins = report["tokens_margins"]
    for estimate, margin in zip(report["estimates"], margins, strict=True):
        drafts = estimate["num_speculative_tokens"]
        table.add_row(
            str(estimate["batch_size"]), str(drafts) if drafts else "none: plain decoding",
            f"{estimate['expected_tokens']:.2f}" + (f" ±{margin:.2f}" if margin else ""),
            f"{estimate['speedup']:.2f}x",
        )  # fmt: skip
    console().print(table)
    if any(margins):
        note("±: what counting leaves open (95 %); other prompts than these may differ by more")
    if not report["speculates"]:
        note(
            "speculation does not pay here: every tree is slower than plain decoding. Serve "
            'without --speculative-config; with the command below "auto" turns speculation off'
        )
    console().print(f"In use from now on: {report['now_used']}", **plain)
    console().print(report["command"], **plain)
    note(f"the tree is in {report['file']}, what was measured in {report['measurements']}")
    if report["picture"]:
        note(f"the tree is drawn in {report['picture']}")
