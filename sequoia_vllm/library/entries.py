"""Makes library entries: a profile and an acceptance vector in, a tree with its schedule out."""

from __future__ import annotations

import hashlib

from sequoia_vllm.hardware.choose import Schedule, choose_schedule
from sequoia_vllm.hardware.models import model_classes, size_name
from sequoia_vllm.hardware.roofline import largest_tree
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.json_file import dump_json
from sequoia_vllm.library.files import AcceptanceFile, ProfileReference, StoredTree, TreeEntry

_MEASURED_MAX_SIZE = 1024
OFFLOADED = "-offloaded"
"""Suffix of model classes whose target does not fit the device, and is streamed to it."""


def make_entry(
    name: str,
    model_class: str,
    profile: Profile,
    reference: ProfileReference,
    vector: AcceptanceFile,
    schedule: Schedule,
) -> TreeEntry:
    """Puts a chosen tree, and what it was chosen from, into one entry."""
    return TreeEntry(
        name=name,
        model_class=model_class,
        target=profile.target,
        draft=profile.draft,
        target_parameters=profile.target_parameters,
        draft_parameters=profile.draft_parameters,
        dtype=profile.dtype,
        tensor_parallel_size=profile.tensor_parallel_size,
        acceptance_class=vector.name,
        acceptance_source=vector.source,
        acceptance_target=vector.target,
        acceptance_draft=vector.draft,
        temperature=vector.temperature,
        acceptance=vector.acceptance,
        profile=reference,
        streamed=profile.streamed,
        tree=StoredTree.of(schedule.tree),
        schedule=schedule.ranges,
        estimates=schedule.estimates,
    )


def profile_reference(profile: Profile, file: str | None = None) -> ProfileReference:
    """Names the profile in an entry; ``file`` is the profile's name within the library."""
    measured = profile.source == "measured"
    digest = hashlib.sha256(dump_json(profile.to_dict()).encode()).hexdigest()
    return ProfileReference(
        source=profile.source,
        date=profile.date,
        device=profile.device,
        context_length=min(curve.context_length for curve in profile.target_forward),
        file=file,
        sha256=digest if measured else None,
        assumptions=profile.assumptions,
    )


def fastest_schedule(profile: Profile, vector: AcceptanceFile) -> Schedule:
    """Chooses the tree and schedule of a library entry."""
    computed = profile.source == "roofline"
    return choose_schedule(
        vector.vector, profile, max_size=largest_tree(profile) if computed else _MEASURED_MAX_SIZE
    )


def model_class_of(profile: Profile) -> str:
    """Returns the model class of a measured profile; a new name if its models are in none."""
    for name, model_class in model_classes().items():
        if (model_class.target.name, model_class.draft.name) == (profile.target, profile.draft):
            return name
    return size_class(profile)


def size_class(profile: Profile) -> str:
    """Names a class by the target's parameters and the draft's, or the draft's kind of head."""
    draft = profile.head.kind if profile.head else size_name(profile.draft_parameters)
    return f"{size_name(profile.target_parameters)}-{draft}"
