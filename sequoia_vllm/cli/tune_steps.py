"""The steps of ``tune``: measures into files, chooses a tree, and shows both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sequoia_vllm.cli.common import console, new_table, note
from sequoia_vllm.cli.measuring import measuring
from sequoia_vllm.drafters.registry import draft_option
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile

if TYPE_CHECKING:
    from sequoia_vllm.calibration.acceptance_task import AcceptanceSettings
    from sequoia_vllm.calibration.measure_profile import ProfileSettings
    from sequoia_vllm.library.pair_key import PairKey
    from sequoia_vllm.tree.acceptance import Acceptance


_INTERRUPTED = "interrupted: no tree was chosen"
_STOPPED_BY = {
    "precision": "the precision asked for was reached",
    "tokens": "--max-tokens-total was reached first",
    "prompts": "all greedy completions are at their end: more prompts, or a larger --max-tokens, "
    "would say more",
}


def count(settings: AcceptanceSettings, stage: str) -> AcceptanceFile:
    """Measures acceptance, and notes how far it got.

    Args:
        stage: The beginning of the progress line.
    """
    from sequoia_vllm.calibration.acceptance_task import AcceptanceTask
    from sequoia_vllm.calibration.measure_acceptance import measure_acceptance

    task = AcceptanceTask.prepare(settings)
    with measuring(f"{stage}acceptance:", _INTERRUPTED) as report:
        measured = measure_acceptance(task, report)
    counts = measured.calibration
    assert counts is not None
    note(f"{counts.trees} trees, {counts.tokens} tokens, acceptance known within "
         f"{counts.precision:.4f}: {_STOPPED_BY[counts.stopped_by]}")  # fmt: skip
    return measured


def time_steps(settings: ProfileSettings, vectors: Sequence[Acceptance], stage: str) -> Profile:
    """Measures a profile; see `measure_profile` and `count`."""
    from sequoia_vllm.calibration.measure_profile import measure_profile

    with measuring(f"{stage}profile:", _INTERRUPTED) as report:
        return measure_profile(settings, report, vectors)


def tune_pair(counting: AcceptanceSettings, timing: ProfileSettings) -> dict[str, Any]:
    """Measures acceptance and times, then chooses and saves the tree; returns the report."""
    from sequoia_vllm.calibration import tuned_tree
    from sequoia_vllm.calibration.measure_profile import checked
    from sequoia_vllm.library.tree_library import TreeLibrary
    from sequoia_vllm.library.user_files import make_writable

    timing = checked(timing)  # before anything is counted
    engine, context, largest = timing.engine, timing.contexts[0], max(timing.tokens)
    library, pair = TreeLibrary(), tuned_tree.pair_here(engine)
    files = library.measurements(pair)
    make_writable(files.directory)  # fails now instead of after measuring
    vector = count(counting, "1 of 2, then profile: ")
    vector.save(files.acceptance)
    times = time_steps(timing, [vector.vector], "2 of 2: ")
    times.save(files.profile)
    entry = tuned_tree.tuned_entry(vector, times, context, largest)
    path = tuned_tree.save_tuned(library, pair, entry)
    config: dict[str, Any] = {"method": "sequoia", **draft_option(pair.draft), "tree": "auto"}
    if engine.offload is not None:
        config["offload"] = engine.offload.model_dump(mode="json", exclude_defaults=True)
    keys = ("device", "target", "draft", "dtype", "tensor_parallel_size")
    return {
        **{key: getattr(pair, key) for key in keys},
        "context_length": context,
        "speculates": entry.tree.size > 1,
        "tree": {"size": entry.tree.size, "depth": entry.tree.depth},
        "schedule": [list(row) for row in entry.schedule],
        "estimates": [estimate.to_dict() for estimate in entry.estimates],
        "tokens_margins": [
            None if one is None else round(one, 4) for one in tuned_tree.margins(entry, vector)
        ],
        "file": str(path),
        "measurements": str(files.directory),
        "now_used": _now_used(pair),
        "command": f"vllm serve {pair.target} --speculative-config '{json.dumps(config)}'",
    }


def _now_used(pair: PairKey) -> str:
    """The source of the tree that an engine with this pair gets by "tree": "auto"."""
    from sequoia_vllm.config import SequoiaConfig
    from sequoia_vllm.engine.frontend.tree_choice import choose_engine_tree, look_up

    config = SequoiaConfig.parse({**draft_option(pair.draft), "tree": "auto"})
    return choose_engine_tree(config, pair, look_up(config, pair)).source


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
            "speculation does not pay here: every tree is slower than plain decoding. Serve "
            'without --speculative-config; with the command below "auto" turns speculation off'
        )
    console().print(f"In use from now on: {report['now_used']}", **plain)
    console().print(report["command"], **plain)
    note(f"the tree is in {report['file']}, what was measured in {report['measurements']}")
