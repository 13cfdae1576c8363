"""The steps of ``tune``: measures into files, chooses a tree, and shows both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sequoia_vllm.cli.common import console, new_table, note
from sequoia_vllm.cli.measuring import measuring
from sequoia_vllm.cli.tree.view import plot_tree
from sequoia_vllm.drafters.registry import draft_option
from sequoia_vllm.figures import FigureError
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile
from sequoia_vllm.verification.methods import DEFAULT_METHOD, method_names

if TYPE_CHECKING:
    from sequoia_vllm.calibration.acceptance_task import AcceptanceSettings, AcceptanceTask
    from sequoia_vllm.calibration.measure_profile import ProfileSettings
    from sequoia_vllm.library.files import CalibrationState, TreeEntry
    from sequoia_vllm.library.pair_key import PairKey
    from sequoia_vllm.library.user_files import TunedFiles
    from sequoia_vllm.tree.acceptance import Acceptance


def count_into(
    path: Path, settings: AcceptanceSettings, name: str, stage: str = ""
) -> AcceptanceFile:
    """Measures acceptance into ``path``; continues the same measurement if the file has one.

    Returns:
        The measurement, marked incomplete if it was interrupted.
    """
    from sequoia_vllm.calibration.acceptance_task import AcceptanceTask
    from sequoia_vllm.calibration.measure_acceptance import measure_acceptance

    task = AcceptanceTask.prepare(settings, name)
    previous = _previous(path, task)
    start = None
    if previous is not None:
        state = _state(previous)
        if task.is_done(state):
            note(f"{path} holds this measurement already ({_covered(state)}): delete it to measure "
                 "anew")  # fmt: skip
            return previous
        if task.can_go_on(state):
            note(f"going on from {path}: {_covered(state)}")
            start = state
    with measuring(f"{stage}acceptance:", "interrupted before anything was measured") as report:
        measured = measure_acceptance(task, start, report, save=lambda file: file.save(path))
    measured.save(path)
    return measured


def finish_counting(measured: AcceptanceFile, path: Path) -> None:
    """Notes where the result is and how far it got; ends the program if it was interrupted."""
    from sequoia_vllm.measuring.interrupts import exit_code, last_interrupt

    state = _state(measured)
    if not state.complete:
        note(f"interrupted: {path} keeps {_covered(state)}; the same command goes on from there")
        raise typer.Exit(exit_code(last_interrupt()))
    reason = {
        "precision": "the precision asked for was reached",
        "tokens": f"--max-tokens-total was reached before ±{state.wanted_precision:g} was",
        "prompts": "all greedy completions are at their end: more prompts, or a larger "
        "--max-tokens, would say more",
    }[state.stopped_by]
    note(f"written to {path}: {_covered(state)}; {reason}")


def time_into(
    path: Path, settings: ProfileSettings, vectors: Sequence[Acceptance], stage: str = ""
) -> Profile:
    """Measures a profile into ``path``; see `measure_profile` and `count_into`."""
    from sequoia_vllm.calibration.measure_profile import measure_profile

    with measuring(f"{stage}profile:", "interrupted: no profile was written") as report:
        measured = measure_profile(settings, report, vectors)
    measured.save(path)
    return measured


def _previous(path: Path, task: AcceptanceTask) -> AcceptanceFile | None:
    """The file of an earlier run of the same measurement; None: there is none."""
    if not path.is_file():
        return None
    file = AcceptanceFile.load(path)
    if file.calibration is None:
        note(f"{path} was not written by this command: starting anew")
        return None
    if changed := task.differences(file.calibration):
        note(f"{path} holds another measurement ({', '.join(changed)} differ): starting anew")
        return None
    return file


def _state(file: AcceptanceFile) -> CalibrationState:
    assert file.calibration is not None  # every file that this command writes has one
    return file.calibration


def _covered(state: CalibrationState) -> str:
    known = "" if state.precision is None else f", known within {state.precision:.4f}"
    return f"{state.trees} trees, {state.tokens} tokens{known}"


def tune_pair(
    counting: AcceptanceSettings,
    timing: ProfileSettings,
    acceptance: Path | None,
    profile: Path | None,
) -> dict[str, Any]:
    """Measures acceptance and times unless files are given, then chooses and saves the tree.

    Args:
        acceptance, profile: Files of earlier measurements; None: measure.

    Returns:
        The command's report.
    """
    from sequoia_vllm.calibration import tuned_tree
    from sequoia_vllm.library.tree_library import TreeLibrary
    from sequoia_vllm.library.user_files import make_writable

    engine, context, largest = timing.engine, timing.contexts[0], max(timing.tokens)
    library, pair = TreeLibrary(), tuned_tree.pair_here(engine)
    files = library.measurements(pair)
    make_writable(files.directory)  # fails now instead of after measuring
    vector = None if acceptance is None else AcceptanceFile.load(acceptance)
    times = None if profile is None else Profile.load(profile)
    if vector is not None:
        tuned_tree.check_vector(pair, vector)
    if times is not None:
        tuned_tree.check_profile(pair, times)
    stages = _stages(("acceptance", vector), ("profile", times))
    if vector is None:
        vector = _counted(files.acceptance, counting, next(stages))
    if times is None:
        times = time_into(files.profile, timing, [vector.vector], next(stages))
    vector.save(files.acceptance)  # changes the file only if a vector was given
    times.save(files.profile)
    entry = tuned_tree.tuned_entry(vector, times, context, largest)
    if counting.temperature > 0 and acceptance is None and entry.tree.size > 1:
        method, on_tree = _compared(counting, entry, vector, files)
        if method != DEFAULT_METHOD:
            # Counts with traversal choose how much of this tree to draft. A tree chosen from
            # them would be too shallow: they depend on the nodes below a node.
            entry = tuned_tree.tuned_entry(on_tree, times, context, largest, entry.tree)
        entry = entry.model_copy(update={"verification": method})
    path = tuned_tree.save_tuned(library, pair, entry)
    best = tuned_tree.best_tree_at_any_price(vector, times, context)
    picture, title = files.directory / "tree.svg", f"{pair.target} with {pair.draft}"
    picture.unlink(missing_ok=True)
    with suppress(FigureError):  # matplotlib is an extra
        plot_tree(entry.tree, vector.vector, title, picture)
    config: dict[str, Any] = {"method": "sequoia", **draft_option(pair.draft), "tree": "auto"}
    if engine.offload is not None:
        config["offload"] = engine.offload.model_dump(mode="json", exclude_defaults=True)
    keys = ("device", "target", "draft", "dtype", "tensor_parallel_size")
    return {
        **{key: getattr(pair, key) for key in keys},
        "context_length": context,
        "speculates": entry.tree.size > 1,
        "tree": {"size": entry.tree.size, "depth": entry.tree.depth},
        "verification": entry.verification or DEFAULT_METHOD,
        "schedule": [list(row) for row in entry.schedule],
        "estimates": [estimate.to_dict() for estimate in entry.estimates],
        "tokens_margins": [
            None if one is None else round(one, 4) for one in tuned_tree.margins(entry, vector)
        ],
        "best_tree_at_batch_1": {
            "expected_tokens": round(best.expected_tokens, 4),
            "speedup": round(best.speedup, 4),
        },
        "file": str(path),
        "measurements": str(files.directory),
        "picture": str(picture) if picture.exists() else None,
        "now_used": _now_used(pair),
        "command": f"vllm serve {pair.target} --speculative-config '{json.dumps(config)}'",
    }


def _stages(*measurements: tuple[str, Any]) -> Iterator[str]:
    """Prefixes for the progress of the measurements still to make: "1 of 2, then profile: "."""
    names = [name for name, given in measurements if given is None]
    for number, following in enumerate([*names[1:], None], start=1):
        then = f", then {following}" if following else ""
        yield f"{number} of {len(names)}{then}: "


def _counted(path: Path, settings: AcceptanceSettings, stage: str) -> AcceptanceFile:
    """Measures acceptance into ``path``; ends the program if it is interrupted."""
    measured = count_into(path, settings, f"tuned-t{settings.temperature:g}", stage)
    finish_counting(measured, path)
    return measured


def _compared(
    settings: AcceptanceSettings, entry: TreeEntry, vector: AcceptanceFile, files: TunedFiles
) -> tuple[str, AcceptanceFile]:
    """The verification method with more tokens per step from this tree, and its acceptance.

    Each method is measured with half of the tokens for acceptance.
    """
    from sequoia_vllm.calibration.tuned_tree import better_method, refined, tokens_per_step

    tree = entry.tree
    methods, measured = method_names(), {}
    for number, method in enumerate(methods, start=1):
        how = replace(
            settings, tree=tree, verification=method,
            max_tokens_total=max(1, settings.max_tokens_total // 2),
        )  # fmt: skip
        stage = f"verification {number} of {len(methods)} ({method}), "
        measured[method] = _counted(files.directory / f"{method}.json", how, stage)
    found = " and ".join(f"{tokens_per_step(measured[m]):.2f} with {m}" for m in methods)
    note(f"tokens per step from the tree of {tree.size} nodes: {found}")
    method = better_method(measured)
    return method, refined(vector, measured[method])


def _now_used(pair: PairKey) -> str:
    """The source of the tree that an engine with this pair gets by "tree": "auto"."""
    from sequoia_vllm.config import SequoiaConfig
    from sequoia_vllm.engine.frontend.tree_choice import choose_engine_tree, look_up

    config = SequoiaConfig.parse({**draft_option(pair.draft), "tree": "auto"})
    return choose_engine_tree(config, pair, look_up(config, pair)).source


def print_acceptance(measured: AcceptanceFile) -> None:
    """Prints the vector as a table: rows are children, columns are depths."""
    import numpy as np

    rows = measured.vector.table
    low, high = (np.atleast_2d(np.asarray(ends)) for ends in (measured.low, measured.high))
    half_widths, trials = (high - low) / 2, np.atleast_2d(np.asarray(measured.trials))
    table = new_table(
        "child", *(f"depth {depth + 1}" for depth in range(len(rows))), title=measured.description,
        caption="share accepted, half-width of its 95 % interval",
    )  # fmt: skip
    for column in table.columns:
        column.no_wrap = True
    for child, (shares, widths) in enumerate(zip(rows.T, half_widths.T, strict=True), start=1):
        cells = (f"{share:.3f} ±{width:.3f}" for share, width in zip(shares, widths, strict=True))
        table.add_row(str(child), *cells)
    table.add_row("any", *(f"{row.sum():.3f}" for row in rows))
    table.add_row("trials", *(str(row[0]) for row in trials))
    console().print(table)


def print_profile(measured: Profile) -> None:
    """Prints a table for each context: milliseconds by batch size, part and tokens."""
    sizes = sorted({n for curve in measured.target_forward for n in curve.tokens})
    parts = {
        "target": measured.target_forward,
        "draft level": measured.draft_level,
        "verification": measured.verification or [],
    }
    for context in sorted({curve.context_length for curve in measured.target_forward}):
        table = new_table(
            "batch", "part", *map(str, sizes), left=["part"],
            title=f"{measured.device}, {measured.dtype}, {context} tokens of context",
            caption="milliseconds, by tokens of each request",
        )  # fmt: skip
        for rest in (one for one in measured.overhead if one.context_length in (None, context)):
            for name, curves in parts.items():
                for curve in curves:
                    if (curve.batch_size, curve.context_length) == (rest.batch_size, context):
                        seconds = dict(zip(curve.tokens, curve.seconds, strict=True))
                        batch = str(rest.batch_size) if name == "target" else ""
                        cells = (f"{1e3 * seconds[n]:.2f}" if n in seconds else "" for n in sizes)
                        table.add_row(batch, name, *cells)
            plain, tree = f"{1e3 * rest.plain_seconds:.2f}", f"{1e3 * rest.tree_seconds:.2f}"
            table.add_row("", "the rest", *(plain if n == 1 else tree for n in sizes))
        console().print(table)


def print_report(report: dict[str, Any]) -> None:
    """Prints the report of `tune_steps.tune_pair`."""
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
            "speculation does not pay here: the best tree at batch size 1 would run at "
            f"{report['best_tree_at_batch_1']['speedup']:.2f}x plain decoding. Serve without "
            '--speculative-config; with the command below "auto" turns speculation off by itself'
        )
    console().print(f"In use from now on: {report['now_used']}", **plain)
    console().print(report["command"], **plain)
    note(f"the tree is in {report['file']}, what was measured in {report['measurements']}")
    if report["picture"]:
        note(f"the tree is drawn in {report['picture']}")
