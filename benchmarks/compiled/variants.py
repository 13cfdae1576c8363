"""All variants of the engine's kernels, and those of them to compile."""

import re
from collections.abc import Sequence
from functools import cache

from benchmarks.compiled.attention_variants import attention_variants
from benchmarks.compiled.drafting_variants import (
    begin_drafting_variants,
    children_variants,
    continuation_variants,
    draft_input_variants,
    target_state_variants,
    truncation_variants,
)
from benchmarks.compiled.recurrent_variants import recurrent_variants
from benchmarks.compiled.variant import CAPABILITIES, Variant
from benchmarks.compiled.verification_variants import (
    commit_variants,
    path_edit_variants,
    scoring_input_variants,
    target_statistics_variants,
    traversal_variants,
    verify_variants,
)

Task = tuple[Variant, int]
"""A variant and the compute capability (times ten) to compile it for."""


@cache
def all_variants() -> tuple[Variant, ...]:
    """The variants of all kernels, in the order of the pages."""
    variants = (
        *attention_variants(), *children_variants(), *commit_variants(), *path_edit_variants(),
        *target_statistics_variants(), *verify_variants(), *traversal_variants(),
        *begin_drafting_variants(), *truncation_variants(), *draft_input_variants(),
        *target_state_variants(), *scoring_input_variants(), *continuation_variants(),
        *recurrent_variants(),
    )  # fmt: skip
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"variants share a name: {sorted(names)}")
    return variants


def variants_by_kernel() -> dict[str, list[Variant]]:
    """The variants of each kernel, by its name."""
    found: dict[str, list[Variant]] = {}
    for variant in all_variants():
        found.setdefault(variant.kernel.__name__, []).append(variant)
    return found


def all_tasks(capabilities: Sequence[int] = CAPABILITIES, pattern: str = "") -> list[Task]:
    """Every variant whose name has the pattern, with those capabilities that it is meant for."""
    return [
        (variant, capability)
        for variant in all_variants()
        for capability in capabilities
        if capability in variant.capabilities and re.search(pattern, variant.name)
    ]


def sample_tasks() -> list[Task]:
    """Each kernel once, its first variant, for the capabilities turn about."""
    tasks = []
    for number, variants in enumerate(variants_by_kernel().values()):
        first = variants[0]
        tasks.append((first, first.capabilities[number % len(first.capabilities)]))
    return tasks
