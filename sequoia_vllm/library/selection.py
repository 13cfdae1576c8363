"""Which of a device's stored trees serves a model pair, and the entry made where none does."""

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from sequoia_vllm.drafters.registry import drafter, drafts_from_text
from sequoia_vllm.hardware.choose import Schedule, choose_schedule
from sequoia_vllm.hardware.device import Device, DeviceSpec
from sequoia_vllm.hardware.models import ModelShape, model_classes, parameters_from_name, size_name
from sequoia_vllm.hardware.roofline import largest_tree, roofline_profile
from sequoia_vllm.hardware.step_profile import HOW_TIMED, Profile
from sequoia_vllm.json_file import dump_json
from sequoia_vllm.library.files import (
    AcceptanceFile,
    LibraryError,
    LibraryFile,
    ProfileReference,
    TreeEntry,
)
from sequoia_vllm.library.pair_key import PairKey, PairShapes, is_local
from sequoia_vllm.tree import MOST_NODES

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
    names = (
        "target", "draft", "target_parameters", "draft_parameters", "dtype",
        "tensor_parallel_size", "streamed",
    )  # fmt: skip
    return TreeEntry(
        name=name,
        model_class=model_class,
        **{name: getattr(profile, name) for name in names},
        acceptance_class=vector.name,
        acceptance_source=vector.source,
        acceptance_target=vector.target,
        acceptance_draft=vector.draft,
        temperature=vector.temperature,
        acceptance=vector.acceptance,
        profile=reference,
        tree=schedule.tree,
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
    most = largest_tree(profile) if computed else MOST_NODES
    return choose_schedule(vector.vector, profile, max_size=most)


def model_class_of(profile: Profile) -> str:
    """Returns the model class of a measured profile; a new name if its models are in none."""
    pairs = {(one.target.name, one.draft.name): name for name, one in model_classes().items()}
    return pairs.get((profile.target, profile.draft)) or size_class(profile)


def size_class(profile: Profile) -> str:
    """Names a class by the target's parameters and the draft's, or else the draft's kind."""
    draft = profile.head.kind if profile.head else size_name(profile.draft_parameters)
    if drafts_from_text(profile.draft):
        draft = profile.draft
    return f"{size_name(profile.target_parameters)}-{draft}"


logger = logging.getLogger("vllm.sequoia.library")  # shown by vLLM's own handler
_log_once = cache(logger.info)

IsPair = Callable[[str | None, str | None], bool]
"""Whether a target and a draft, by their names in the library, are the pair of an engine."""


@dataclass(frozen=True)
class Selection:
    """The tree to use, and in one line what was chosen and why."""

    entry: TreeEntry
    reason: str


def selection(entry: TreeEntry, reasons: list[str]) -> Selection:
    """The selection of this entry, logged once."""
    estimate = entry.estimates[0]
    size, depth = entry.tree.size, entry.tree.depth
    shape = f"{size - 1} drafts, depth {depth}" if size > 1 else "no drafts for one request"
    reason = (
        f"tree {entry.name}: {shape}, expected "
        f"{estimate.speedup:.2f}x plain decoding at batch size {estimate.batch_size} "
        f"({HOW_TIMED[entry.profile.source]}); " + "; ".join(reasons)
    )
    _log_once("Sequoia: %s", reason)
    return Selection(entry, reason)


def runs_as_here(
    entry: TreeEntry, file: LibraryFile, device: Device, pair: PairKey, shapes: PairShapes
) -> bool:
    """Whether an entry is for models that run as here.
    If not, a tree computed for them is better, where there is a datasheet to compute from."""
    if file.datasheet is None:
        return True
    if pair.offloading is not None:
        return False  # other bytes, or over another link
    runs = pair.tensor_parallel_size, pair.dtype
    same_run = (entry.tensor_parallel_size, entry.dtype) == runs and not shapes.quantized
    return same_run and device.id == file.device and device.mig is None


def choose_vector(vectors: Sequence[AcceptanceFile], is_pair: IsPair) -> tuple[AcceptanceFile, str]:
    """The vector to assume for a pair, and why: the one measured on the pair, the greedy one of
    several; else the weakest of those that were published."""
    own = [vector for vector in vectors if is_pair(vector.target, vector.draft)]
    if own:
        found = min(own, key=lambda vector: vector.temperature or 0.0)
        return found, f"acceptance {found.name} measured on this pair"
    # A vector measured on another pair says nothing of this one.
    others = [vector for vector in vectors if vector.source == "published"] or vectors
    weakest = min(others, key=lambda vector: (vector.vector.table[0, 0], vector.name))
    return weakest, f"acceptance of this pair not measured: the weakest class, {weakest.name}"


def best_entry(
    entries: list[TreeEntry], pair: PairKey, vector: AcceptanceFile
) -> tuple[TreeEntry, list[str]]:
    """The entry made for this vector, and in words how its run differs from this one."""
    alike = [entry for entry in entries if entry.acceptance_class == vector.name]
    entry = min(alike, key=lambda e: abs(e.tensor_parallel_size - pair.tensor_parallel_size))
    compared = (
        ("TP size", entry.tensor_parallel_size, pair.tensor_parallel_size),
        ("dtype", entry.dtype, pair.dtype),
    )
    return entry, [
        f"made for {what} {stored}, not {here}" for what, stored, here in compared if stored != here
    ]


def nearest_in_size(
    entries: list[TreeEntry], pair: PairKey, shapes: PairShapes | None
) -> tuple[list[TreeEntry], str]:
    """The entries of the model class nearest to a pair in size, and why. Times scale with sizes, so
    these are compared as ratios; one that is not known is left out."""
    sizes = parameters_of(pair, shapes)

    def distance(entry: TreeEntry) -> tuple[float, str]:
        stored = entry.target_parameters, entry.draft_parameters
        ratios = [size / own for size, own in zip(sizes, stored, strict=True) if size is not None]
        return math.hypot(*map(math.log, ratios)), entry.model_class

    if sizes == (None, None):  # the smallest tree is the safest
        best = min(entries, key=lambda e: (e.tree.size, e.name)).model_class
        why = f"the sizes of {pair.target} and {pair.draft} are unknown: the most cautious model "
        why += f"class, {best}"
    else:
        best = min(entries, key=distance).model_class
        target, draft = map(size_name, sizes)
        why = f"model class {best} is the nearest to a target of {target} and a draft of {draft} "
        why += "parameters"
    return [entry for entry in entries if entry.model_class == best], why


def parameters_of(pair: PairKey, shapes: PairShapes | None) -> tuple[float | None, float | None]:
    """Parameters of target and draft, by their shapes or else by their names; None: not known.
    A head's name has its target's size, and tells nothing of the head's."""

    known = shapes or PairShapes(None, None)

    def size(shape: ModelShape | None, model: str) -> float | None:
        if shape is not None:
            return shape.parameters
        return None if is_local(model) else parameters_from_name(model)

    draft = None if known.head and known.draft is None else size(known.draft, pair.draft)
    return size(known.target, pair.target), draft


def computed_entry(
    device: str, spec: DeviceSpec, shapes: PairShapes, pair: PairKey, vector: AcceptanceFile
) -> tuple[TreeEntry, str]:
    """Computes the entry that the library would have for models of these shapes, by the roofline.
    ``device`` and ``spec`` are of the device, or of the one whose datasheet is used.

    Returns:
        The entry, and what it was computed from.

    Raises:
        LibraryError: It cannot be computed; the message says why.
    """
    target, draft, streamed = shapes.target, shapes.draft, shapes.streamed
    if target is None or draft is None:
        raise LibraryError(shapes.problem or "the models' shapes are not known")
    if pair.offloading is not None and streamed is None:
        raise LibraryError(shapes.problem or "how much of the target is offloaded is not known")
    devices = pair.tensor_parallel_size
    try:
        profile = roofline_profile(spec, target, draft, pair.dtype, devices, streamed=streamed)
    except ValueError as error:
        raise LibraryError(str(error)) from error
    model_class = size_class(profile) + ("" if pair.offloading is None else OFFLOADED)
    name = f"computed/{device}/{model_class}/{vector.name}"
    schedule = fastest_schedule(profile, vector)
    reference = profile_reference(profile)
    entry = make_entry(name, model_class, profile, reference, vector, schedule)
    how = f"{pair.dtype}, TP size {devices}"
    if shapes.quantized:
        how += ", quantized weights"
    if streamed is not None:
        size = streamed.bytes_per_pass / 1e9
        how += f", {size:.1f} GB of weights read in each pass: {streamed.source}"
    kind = drafter(shapes.head).name if shapes.head else "a draft"
    sizes = size_name(target.parameters), size_name(draft.parameters)
    pair_in_words = f"a target of {sizes[0]} and {kind} of {sizes[1]} parameters"
    return entry, f"computed for {pair_in_words} ({how})"
