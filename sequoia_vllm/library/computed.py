"""The entry of a pair that the library has none for, computed from its models' shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sequoia_vllm.hardware.device import DeviceSpec
from sequoia_vllm.hardware.models import PairShapes
from sequoia_vllm.hardware.roofline import roofline_profile
from sequoia_vllm.hardware.scaled_profile import scaled_profile
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.files import AcceptanceFile, TreeEntry
from sequoia_vllm.library.generate import (
    OFFLOADED,
    fastest_schedule,
    make_entry,
    profile_reference,
    size_class,
)
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.selection import Request, Strength, choose_strength, size_names


@dataclass(frozen=True)
class Basis:
    """What entries are computed from, besides shapes.

    Attributes:
        device: Its id, or that of the one whose values are used for it.
        spec: Datasheet; None: the device has none, and the measurements are scaled.
        measured: Profiles of other models on this kind of device.
        vectors: Acceptance to choose from.
        learned: What was counted while this pair was served, which is better than any of them.
        own: Times of this very pair here, which are better than any others.
    """

    device: str
    spec: DeviceSpec | None
    measured: Sequence[Profile]
    vectors: Sequence[AcceptanceFile]
    learned: AcceptanceFile | None = None
    own: Profile | None = None


def computed_entry(
    basis: Basis, shapes: PairShapes, request: Request
) -> tuple[TreeEntry | None, str]:
    """As ``sequoia-vllm tree generate`` would make it, had the library this model class.

    Returns:
        The entry, and what it was computed from; or None, and why it cannot be.

    Raises:
        LibraryError: If the acceptance class asked for is not there.
    """
    pair = request.pair
    if shapes.target is None or shapes.draft is None:
        return None, shapes.problem or "the models' shapes are not known"
    if basis.own is None:
        shapes = shapes.located()
    if pair.offloading is not None and shapes.streamed is None and basis.own is None:
        return None, shapes.problem or "how much of the target is offloaded is not known"
    try:
        profile = _profile(basis, pair, shapes)
    except ValueError as error:
        return None, str(error)
    if profile is None:
        return None, f"no times of {basis.device} to compute from"
    vector, why = _vector(basis, request)
    sizes = size_class(profile) + ("" if pair.offloading is None else OFFLOADED)
    entry = make_entry(
        f"computed/{basis.device}/{sizes}/{vector.name}",
        sizes,
        profile,
        profile_reference(profile),
        vector,
        fastest_schedule(profile, vector),
    )
    how = f"{pair.dtype}, TP size {profile.tensor_parallel_size}"
    if profile.tensor_parallel_size != pair.tensor_parallel_size:
        how += f" and not {pair.tensor_parallel_size}"
    if shapes.quantized:
        how += ", quantized weights"
    if profile.streamed is not None:
        size = profile.streamed.bytes_per_pass / 1e9
        how += f", {size:.1f} GB of weights read in each pass: {profile.streamed.source}"
    return entry, f"computed for {size_names(shapes)} ({how}); {why}"


def _profile(basis: Basis, pair: PairKey, shapes: PairShapes) -> Profile | None:
    target, draft, streamed = shapes.target, shapes.draft, shapes.streamed
    if basis.own is not None:
        return basis.own
    if target is None or draft is None:
        return None
    if basis.spec is not None:
        size = pair.tensor_parallel_size
        return roofline_profile(basis.spec, target, draft, pair.dtype, size, streamed=streamed)
    if not basis.measured:
        return None
    return scaled_profile(basis.measured, target, draft, pair.dtype, streamed)


def _vector(basis: Basis, request: Request) -> tuple[AcceptanceFile, str]:
    if basis.learned is not None and request.acceptance_class is None:
        return basis.learned, f"acceptance {basis.learned.description}"
    vectors = basis.vectors
    strengths = [
        Strength(v.name, v.source, v.target, v.draft, v.temperature, v.acceptance) for v in vectors
    ]
    name, why = choose_strength(strengths, request)
    return next(vector for vector in vectors if vector.name == name), why
