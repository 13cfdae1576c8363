"""``sequoia-vllm tune``: the best tree for a model pair on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sequoia_vllm.cli import calibrate as calibrate_command
from sequoia_vllm.cli import profile as profile_command
from sequoia_vllm.cli.common import console, friendly_errors, note, print_json
from sequoia_vllm.cli.measuring import (
    CacheOption,
    DraftOption,
    DtypeOption,
    EagerOption,
    JsonOption,
    OffloadDirectoryOption,
    OffloadMemoryOption,
    PromptsOption,
    RawPromptsOption,
    RestartOption,
    TargetOption,
    TemperatureOption,
    TensorParallelOption,
    TopPOption,
    check_models,
    note_synthetic,
    numbers,
    offload_spec,
    quiet_engines,
    write_file,
)
from sequoia_vllm.verification.methods import DEFAULT_METHOD, method_names

if TYPE_CHECKING:
    from sequoia_vllm.calibration.acceptance import AcceptanceSettings
    from sequoia_vllm.config import OffloadSpec
    from sequoia_vllm.hardware.cost import Estimate
    from sequoia_vllm.library.files import AcceptanceFile, TreeEntry
    from sequoia_vllm.library.pair_key import PairKey
    from sequoia_vllm.library.user_files import TunedFiles


@dataclass(frozen=True)
class Budget:
    """How much is measured unless options say otherwise.

    Attributes:
        counted: Tokens of a completion on which acceptance is counted, before the next prompt's:
            few trees are to be of many prompts, as these differ more than anything else.
        completion: Tokens of one on which steps are timed.
    """

    precision: float
    max_tokens_total: int
    branch: int
    depth: int
    counted: int
    batch_sizes: str
    tokens: str
    context: int
    completion: int
    rounds: int
    enough_seconds: float | None


# Where a pass waits for weights, larger trees pay, and small ones are known to.
OFFLOADED, OFFLOADED_QUICK = "1,8,16,32,48,64,96,128", "1,16,32,64,128"
FULL = Budget(0.02, 100_000, 10, 5, 128, "1,2,4,8", "1,2,3,4,5,6,8,12,16,32,64", 512, 32, 3, None)
QUICK = Budget(0.07, 4_000, 4, 3, 32, "1,4", "1,2,4,8,16,32", 128, 24, 2, 60)


def _default(field: str) -> str:
    # Not in square brackets: rich takes those for markup.
    return f"Default {getattr(FULL, field)}, with --quick {getattr(QUICK, field)}."


def tune(
    target: TargetOption,
    draft: DraftOption,
    prompts: PromptsOption = None,
    raw_prompts: RawPromptsOption = False,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, and less exactly.")] = False,
    precision: Annotated[
        float | None,
        typer.Option(
            min=1e-4, max=0.5, help=f"As of calibrate. {_default('precision')}", show_default=False
        ),
    ] = None,
    max_tokens_total: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"As of calibrate. {_default('max_tokens_total')}", show_default=False
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes to time; the schedule reaches to the largest. "
            f"{_default('batch_sizes')}",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help=f"Tree sizes to time; no larger tree is chosen. {_default('tokens')} With "
            f"--offload-directory {OFFLOADED}, or {OFFLOADED_QUICK}.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Usual tokens of context. {_default('context')}", show_default=False
        ),
    ] = None,
    acceptance: Annotated[
        Path | None, typer.Option(help="Use this file of calibrate: do not measure acceptance.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Use this file of profile: do not measure times.")
    ] = None,
    dtype: DtypeOption = "auto",
    tensor_parallel_size: TensorParallelOption = 1,
    eager: EagerOption = False,
    kv_cache_gib: CacheOption = 1.0,
    offload_directory: OffloadDirectoryOption = None,
    offload_memory_gib: OffloadMemoryOption = 0.0,
    restart: RestartOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure, choose the best tree for each batch size, and keep it for `"tree": "auto"`.

    It lies in the user's tree directory ($SEQUOIA_VLLM_TREES), with both
    measurements beside it, and is for exactly this device, pair and dtype.
    """
    from sequoia_vllm.calibration.acceptance import AcceptanceSettings
    from sequoia_vllm.calibration.profiling import ProfileSettings
    from sequoia_vllm.calibration.tune import (
        best_tree_at_any_price,
        margins,
        pair_here,
        quick_engine,
        save_tuned,
    )
    from sequoia_vllm.calibration.tune import tuned_entry as choose
    from sequoia_vllm.library.tree_library import TreeLibrary
    from sequoia_vllm.library.user_files import make_writable
    from sequoia_vllm.measuring.engines import EngineSpec

    quiet_engines()
    if acceptance is None or profile is None:
        with friendly_errors():
            check_models(target, draft)
    note_synthetic(target, draft)
    budget = QUICK if quick else FULL
    usual_context = context or budget.context
    usual_sizes = budget.tokens
    if offload_directory is not None:
        usual_sizes = OFFLOADED_QUICK if quick else OFFLOADED
    sizes = numbers("--tokens", tokens or usual_sizes)
    engine = EngineSpec(
        target, draft, dtype=dtype, tensor_parallel_size=tensor_parallel_size,
        enforce_eager=eager, kv_cache_gib=kv_cache_gib,
        offload=offload_spec(offload_directory, offload_memory_gib),
    )  # fmt: skip
    how_to_calibrate = AcceptanceSettings(
        # Compiling changes no acceptance, and may take longer than all the counting.
        replace(engine, enforce_eager=eager or quick),
        prompts=prompts, raw_prompts=raw_prompts, temperature=temperature, top_p=top_p,
        branch=budget.branch, depth=budget.depth, max_tokens=budget.counted,
        precision=precision or budget.precision,
        max_tokens_total=max_tokens_total or budget.max_tokens_total,
    )  # fmt: skip
    how_to_profile = ProfileSettings(
        engine, prompts=prompts, tokens=sizes, contexts=(usual_context,),
        batch_sizes=numbers("--batch-sizes", batch_sizes or budget.batch_sizes),
        max_tokens=budget.completion, rounds=budget.rounds, temperature=temperature,
        enough_seconds=budget.enough_seconds,
    )  # fmt: skip
    with friendly_errors():
        library = TreeLibrary()
        pair = pair_here(engine)
        files = library.measurements(pair)
        make_writable(files.directory)  # not after all the measuring
        vector, times = _given(pair, acceptance, profile)
        stages = _stages(("acceptance", vector), ("profile", times))
        if vector is None:
            vector = _calibrated(files.acceptance, how_to_calibrate, restart, next(stages))
        if times is None:
            if quick:
                how_to_profile = replace(how_to_profile, engine=quick_engine(engine))
            times = profile_command.measure_into(
                files.profile, how_to_profile, vectors=[vector.vector], stage=next(stages)
            )
        write_file(files.acceptance, vector)  # the same bytes, unless it was given
        write_file(files.profile, times)
        entry = choose(vector, times, usual_context, max(sizes))
        if temperature > 0 and acceptance is None and entry.tree.size > 1:
            method, vector_of_method = _compared(how_to_calibrate, entry, vector, files, restart)
            if method != DEFAULT_METHOD:
                # A node's acceptance by traversal counts what lies below it, so a tree chosen
                # from these counts would come out too shallow; how much of this one, is theirs.
                entry = choose(vector_of_method, times, usual_context, max(sizes), entry.tree.tree)
                entry = entry.model_copy(update={"verification": method})
        path = save_tuned(library, pair, entry)
        best = best_tree_at_any_price(vector, times, usual_context)
        known = margins(entry, vector)
        now_used = _now_used(pair)
    if as_json:
        print_json(_report(pair, engine.offload, entry, path, now_used, best, known))
    else:
        _print(pair, engine.offload, entry, path, now_used, best, known)


def _given(pair: PairKey, acceptance: Path | None, profile: Path | None) -> tuple[Any, Any]:
    """The measurements that were given as files, checked; None where none was."""
    from sequoia_vllm.calibration.tune import check_profile, check_vector
    from sequoia_vllm.hardware.step_profile import Profile
    from sequoia_vllm.library.files import AcceptanceFile

    vector = None if acceptance is None else AcceptanceFile.load(acceptance)
    times = None if profile is None else Profile.load(profile)
    if vector is not None:
        check_vector(pair, vector)
    if times is not None:
        check_profile(pair, times)
    return vector, times


def _stages(*measurements: tuple[str, Any]) -> Iterator[str]:
    """How progress names each measurement that is not given: "1 of 2, then profile: "."""
    names = [name for name, given in measurements if given is None]
    for number, following in enumerate([*names[1:], None], start=1):
        then = f", then {following}" if following else ""
        yield f"{number} of {len(names)}{then}: "


def _calibrated(path: Path, settings: Any, restart: bool, stage: str) -> Any:
    """Measures acceptance into ``path``; the program ends there if it is interrupted."""
    from sequoia_vllm.calibration.acceptance import AcceptanceTask

    task = AcceptanceTask.prepare(settings, f"tuned-t{settings.temperature:g}")
    measured = calibrate_command.measure_into(path, task, restart, stage=stage)
    calibrate_command.finish(measured, path)
    return measured


def _compared(
    settings: AcceptanceSettings,
    entry: TreeEntry,
    vector: AcceptanceFile,
    files: TunedFiles,
    restart: bool,
) -> tuple[str, AcceptanceFile]:
    """The verification that emits more from this tree, and its acceptance there.

    Each method gets half of the tokens that acceptance was measured with.
    """
    from sequoia_vllm.calibration.methods import better_method, refined, tokens_per_step

    tree = entry.tree.tree
    methods, measured = method_names(), {}
    for number, method in enumerate(methods, start=1):
        how = replace(
            settings, tree=tree, verification=method,
            max_tokens_total=max(1, settings.max_tokens_total // 2),
        )  # fmt: skip
        stage = f"verification {number} of {len(methods)} ({method}), "
        measured[method] = _calibrated(files.directory / f"{method}.json", how, restart, stage)
    found = " and ".join(f"{tokens_per_step(measured[m]):.2f} with {m}" for m in methods)
    note(f"tokens per step from the tree of {tree.size} nodes: {found}")
    method = better_method(measured)
    return method, refined(vector, measured[method])


def _now_used(pair: PairKey) -> str:
    """What an engine of this pair answers to "tree": "auto", asked as it asks."""
    from sequoia_vllm.config import SequoiaConfig
    from sequoia_vllm.engine.frontend.tree_choice import choose_engine_tree

    return choose_engine_tree(SequoiaConfig(model=pair.draft, tree="auto"), pair).source


def _serve_command(pair: PairKey, offload: OffloadSpec | None) -> str:
    config: dict[str, Any] = {"method": "sequoia", "model": pair.draft, "tree": "auto"}
    if offload is not None:
        config["offload"] = offload.model_dump(mode="json", exclude_defaults=True)
    return f"vllm serve {pair.target} --speculative-config '{json.dumps(config)}'"


def _report(
    pair: PairKey, offload: OffloadSpec | None, entry: TreeEntry, path: Path, now_used: str,
    best: Estimate, known: list[float | None],
) -> dict[str, Any]:  # fmt: skip
    return {
        "device": pair.device,
        "target": pair.target,
        "draft": pair.draft,
        "dtype": pair.dtype,
        "tensor_parallel_size": pair.tensor_parallel_size,
        "speculates": entry.tree.size > 1,
        "tree": {"size": entry.tree.size, "depth": entry.tree.depth},
        "verification": entry.verification or DEFAULT_METHOD,
        "schedule": [list(row) for row in entry.schedule],
        "estimates": [estimate.to_dict() for estimate in entry.estimates],
        "tokens_margins": [None if one is None else round(one, 4) for one in known],
        "best_tree_at_batch_1": {
            "expected_tokens": round(best.expected_tokens, 4), "speedup": round(best.speedup, 4),
        },
        "file": str(path),
        "measurements": str(path.parent / "measurements" / path.stem),
        "now_used": now_used,
        "command": _serve_command(pair, offload),
    }  # fmt: skip


def _print(
    pair: PairKey, offload: OffloadSpec | None, entry: TreeEntry, path: Path, now_used: str,
    best: Estimate, known: list[float | None],
) -> None:  # fmt: skip
    from rich.table import Table

    console().print(
        f"{Path(pair.target).name} with {Path(pair.draft).name}, {pair.dtype}, "
        f"{entry.profile.context_length} tokens of context; expected from what was measured:",
        soft_wrap=True, markup=False, highlight=False,
    )  # fmt: skip
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("batch", "drafts per request", "tokens per step", "speedup"):
        table.add_column(column, justify="right")
    for estimate, margin in zip(entry.estimates, known, strict=True):
        drafts = estimate.num_speculative_tokens
        table.add_row(
            str(estimate.batch_size), str(drafts) if drafts else "none: plain decoding",
            f"{estimate.expected_tokens:.2f}" + (f" ±{margin:.2f}" if margin else ""),
            f"{estimate.speedup:.2f}x",
        )  # fmt: skip
    console().print(table)
    if any(known):
        note("±: what counting leaves open (95 %); other prompts than these may differ by more")
    if entry.tree.size == 1:
        note(
            "speculation does not pay here: the best tree at batch size 1 would run at "
            f"{best.speedup:.2f}x plain decoding. Serve without --speculative-config; with the "
            'command below "auto" turns speculation off by itself'
        )
    console().print(f"In use from now on: {now_used}", soft_wrap=True, markup=False)
    console().print(_serve_command(pair, offload), soft_wrap=True, markup=False, highlight=False)
    note(f"the tree is in {path}, what was measured in {path.parent / 'measurements' / path.stem}")
