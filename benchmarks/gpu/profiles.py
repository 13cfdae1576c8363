"""Profiles for the tree library, from the steps that engines took.

What `sequoia-vllm tune` measures on a trained pair, here on made-up weights: times are the same.
"""

import datetime
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.items import ITEMS, MACHINE, PLAIN, TREES
from benchmarks.gpu.models import pair_of
from benchmarks.gpu.results import Results
from sequoia_vllm.hardware.models import every_class
from sequoia_vllm.hardware.step_curves import BatchTimes, batch_curves, draft_curves, steady_steps
from sequoia_vllm.hardware.step_profile import Profile, ProfileError

_WITH = (
    "vLLM's engine with made-up weights (python -m benchmarks.gpu); target_forward is all of a "
    "step that grows with the tree but verification; the draft's passes are one CUDA graph, shared "
    "equally among its levels"
)
_Part = Mapping[str, Any]


def profiles_of(results: Results) -> dict[str, Profile]:
    """A profile of each pair whose steps were timed with trees and plain, by model class."""
    found = {}
    for trees in ITEMS:
        if trees.measure != TREES or trees.options.keys() != {"pair"}:  # not the usual engine
            continue
        name = trees.options["pair"]
        [plain] = (
            item.name
            for item in ITEMS
            if item.measure == PLAIN and _target(item.options["pair"]) == _target(name)
        )
        try:
            profile = _profile(results, name, results.of(plain).parts, results.of(trees.name).parts)
        except ProfileError:  # nothing that a profile can be made of was measured
            continue
        if profile is not None:
            found[name] = profile
    return found


def _target(model_class: str) -> str:
    return pair_of(model_class).target.name


def _profile(
    results: Results, name: str, plain: Mapping[str, _Part], trees: Mapping[str, _Part]
) -> Profile | None:
    by_batch = {}
    for part in _steps(plain):
        steps = steady_steps(part["records"], part["batch"], 1)
        by_batch[part["batch"]] = BatchTimes(part["batch"], part["context"], [steps], {})
    for part in _steps(trees):
        if part["drafts"] and part["batch"] in by_batch:
            size = part["drafts"] + 1
            rounds = by_batch[part["batch"]].trees.setdefault(size, [])
            rounds.append(steady_steps(part["records"], part["batch"], size))
    times = [by_batch[batch] for batch in sorted(by_batch) if by_batch[batch].trees]
    if not times:
        return None
    curves = [batch_curves(one) for one in times]
    pair, machine = every_class()[name], results.of(MACHINE.name).parts["machine"]
    level, reading = draft_curves([curve.draft for curve in curves], pair.draft.head)
    return Profile(
        source="measured", date=datetime.date.fromisoformat(machine["time"][:10]),
        device=machine["device"], target=pair.target.name, draft=pair.draft.name,
        target_parameters=pair.target.parameters, draft_parameters=pair.draft.parameters,
        target_forward=[curve.target for curve in curves], draft_level=level, draft_reading=reading,
        head=pair.draft.head, verification=[curve.verification for curve in curves],
        overhead=[curve.overhead for curve in curves],
        provenance={**machine, "measured_with": _WITH},
    )  # fmt: skip


def _steps(parts: Mapping[str, _Part]) -> list[_Part]:
    """The parts that are times of whole steps."""
    return [part for part in parts.values() if "records" in part]
