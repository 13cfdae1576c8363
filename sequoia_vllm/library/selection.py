"""Which of a device's stored trees serves a model pair."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cache

from sequoia_vllm.drafters import NAMES
from sequoia_vllm.hardware.device import Device
from sequoia_vllm.hardware.models import (
    ModelShape,
    PairShapes,
    nearest_class,
    parameters_from_name,
    size_name,
)
from sequoia_vllm.hardware.schedule import Schedule
from sequoia_vllm.hardware.step_profile import HOW_TIMED
from sequoia_vllm.library.files import LibraryError, LibraryFile, Table, TreeEntry
from sequoia_vllm.library.identity import KnownModels
from sequoia_vllm.library.pair_key import PairKey, is_local
from sequoia_vllm.tree.token_tree import TokenTree

logger = logging.getLogger("vllm.sequoia.library")  # shown by vLLM's own handler


@dataclass(frozen=True)
class Selection:
    """The tree to use, and why.

    Attributes:
        name: Name of the entry; `load` takes it, unless it was computed for this pair.
        schedule: The tree and its prefix by batch size.
        entry: Everything the tree was made from.
        source: "user" (tuned here), or how the times were had that it was chosen with, see
            `Profile.source`.
        expected_tokens: Tokens per request and step at the batch size asked for.
        expected_speedup: Against plain decoding at that batch size.
        reason: One line: what was chosen and why.
        is_timed: Whether its times were measured with this pair here.
    """

    name: str
    schedule: Schedule
    entry: TreeEntry
    source: str
    expected_tokens: float
    expected_speedup: float
    reason: str
    is_timed: bool = True

    @property
    def tree(self) -> TokenTree:
        """The whole stored tree; `schedule` says how much of it to draft."""
        return self.schedule.tree


# Sizes closer than this are the same: some count norms and biases, some do not.
_SAME_SIZE = 1e-3


@dataclass(frozen=True)
class Request:
    """What a tree is looked for.

    Attributes:
        pair: Device, models, and how they run.
        known: By what models are told to be the library's.
        acceptance_class: Draft strength class; None: as is known of the pair.
        temperature: Usual sampling temperature; None: unknown.
    """

    pair: PairKey
    known: KnownModels
    acceptance_class: str | None = None
    temperature: float | None = None

    def is_of(self, target: str | None, draft: str | None) -> bool:
        """Whether this pair is the one that the library calls so."""
        return self.known.same_pair(target, draft, self.pair)


def read_alike(entries: list[TreeEntry], pair: PairKey) -> list[TreeEntry]:
    """Those for weights that are streamed, if the pair's are, or else those for weights in memory.

    The best trees of the two differ by hundreds of nodes.
    """
    is_offloaded = pair.offloading is not None
    return [entry for entry in entries if (entry.streamed is not None) == is_offloaded]


def none_alike(device: str, reason: str) -> LibraryError:
    """What to do where a device has no entries read alike, and why none was computed."""
    return LibraryError(
        f"the library has no trees for offloaded targets on {device}, and none was computed "
        f'({reason}): give a tree size, such as "tree": {{"size": 64, "depth": 10}}'
    )


def differences(entry: TreeEntry, pair: PairKey) -> list[str]:
    """What of an entry's run is not as here, in words."""
    compared = (
        ("TP size", entry.tensor_parallel_size, pair.tensor_parallel_size),
        ("dtype", entry.dtype, pair.dtype),
    )
    return [
        f"made for {what} {stored}, not {here}" for what, stored, here in compared if stored != here
    ]


def made_for(entries: list[TreeEntry], request: Request) -> tuple[list[TreeEntry], str]:
    """The entries for exactly this pair, none if there are none, and why."""
    exact = [entry for entry in entries if request.is_of(entry.target, entry.draft)]
    return exact, f"made for {exact[0].target} with {exact[0].draft}" if exact else ""


def timed_at_size(entries: list[TreeEntry], shapes: PairShapes) -> tuple[list[TreeEntry], str]:
    """The entries measured with other models of exactly these sizes, and why."""
    if shapes.target is None or shapes.draft is None or shapes.quantized or shapes.head:
        return [], ""
    sizes = shapes.target.parameters, shapes.draft.parameters
    found = [
        entry
        for entry in entries
        if entry.profile.source == "measured"
        and math.isclose(entry.target_parameters, sizes[0], rel_tol=_SAME_SIZE)
        and math.isclose(entry.draft_parameters, sizes[1], rel_tol=_SAME_SIZE)
    ]
    return found, f"times measured with models of the same size, {size_names(shapes)}"


def runs_as_here(
    entry: TreeEntry, file: LibraryFile, device: Device, pair: PairKey, shapes: PairShapes
) -> bool:
    """Whether an entry is for models running as here; else computing says more.

    Without a datasheet nothing better than what was measured can be computed.
    """
    if file.datasheet is None:
        return True
    if pair.offloading is not None:
        return False  # other bytes, or over another link
    runs = pair.tensor_parallel_size, pair.dtype
    same_run = (entry.tensor_parallel_size, entry.dtype) == runs and not shapes.quantized
    return same_run and device.id == file.device and device.mig is None


def timed_here(entries: list[TreeEntry], pair: PairKey, *, is_cpu: bool) -> bool:
    """Whether entries that are for a pair were timed with it on this type of device.

    Never on CPUs: their names do not say how many cores an engine has.
    """
    here = pair.device, pair.dtype, pair.tensor_parallel_size
    return not is_cpu and any(
        entry.profile.source == "measured"
        and (entry.profile.device, entry.dtype, entry.tensor_parallel_size) == here
        for entry in entries
    )


def parameters_of(
    pair: PairKey,
    shapes: PairShapes | None,
    target_parameters: float | None,
    draft_parameters: float | None,
) -> tuple[float | None, float | None]:
    """Parameters of target and draft: given, or of the shape, or as a name on the Hub says.

    The name of a head says how many its target has.
    """

    def size(
        model: str, given: float | None, shape: ModelShape | None, is_head: bool
    ) -> float | None:
        if given or shape:
            return given or (shape.parameters if shape else None)
        return None if is_local(model) or is_head else parameters_from_name(model)

    has_head = shapes is not None and shapes.head is not None
    return (
        size(pair.target, target_parameters, shapes.target if shapes else None, False),
        size(pair.draft, draft_parameters, shapes.draft if shapes else None, has_head),
    )


def nearest_in_size(
    entries: list[TreeEntry],
    pair: PairKey,
    target_parameters: float | None,
    draft_parameters: float | None,
) -> tuple[list[TreeEntry], str]:
    """The entries of the model class nearest to a pair in size, and why."""
    sizes = {e.model_class: (e.target_parameters, e.draft_parameters) for e in entries}
    match = nearest_class(sizes, target_parameters, draft_parameters)
    if match is not None:
        return [e for e in entries if e.model_class == match.id], match.reason
    # Nothing is known of the models: the smallest tree is the safest.
    smallest = min(entries, key=lambda e: (e.tree.size, e.name)).model_class
    return [e for e in entries if e.model_class == smallest], (
        f"the sizes of {pair.target} and {pair.draft} are unknown: the most cautious model class, "
        f"{smallest}"
    )


def of_strength(entries: list[TreeEntry], request: Request) -> tuple[list[TreeEntry], str]:
    """The entries of one draft strength class, and why this one; errors as `choose_strength`."""
    strengths = [
        Strength(
            entry.acceptance_class, entry.acceptance_source, entry.acceptance_target,
            entry.acceptance_draft, entry.temperature, entry.acceptance,
        )
        for entry in entries
    ]  # fmt: skip
    name, why = choose_strength(strengths, request)
    return [entry for entry in entries if entry.acceptance_class == name], why


@dataclass(frozen=True)
class Strength:
    """What is known of an acceptance vector; of fields see `AcceptanceFile`."""

    name: str
    source: str
    target: str | None
    draft: str | None
    temperature: float | None
    acceptance: Table

    @property
    def first(self) -> float:
        """Acceptance of the root's first child."""
        row = self.acceptance[0]
        return row[0] if isinstance(row, list) else row


def choose_strength(strengths: list[Strength], request: Request) -> tuple[str, str]:
    """The name of the vector to assume for a pair, and why.

    That asked for by name, or measured on the pair (at the nearest temperature), or
    the weakest of those that were published.

    Raises:
        LibraryError: If the one asked for is not there; lists those that are.
    """
    asked = request.acceptance_class
    if asked is not None:
        names = {strength.name for strength in strengths}
        if asked not in names:
            raise LibraryError(
                f"no acceptance class {asked!r} for this pair; there are {', '.join(sorted(names))}"
            )
        return asked, f"acceptance class {asked} as asked"
    own = [s for s in strengths if request.is_of(s.target, s.draft)]
    if own:
        wanted = request.temperature or 0.0
        name = min(own, key=lambda s: abs((s.temperature or 0.0) - wanted)).name
        return name, f"acceptance {name} measured on this pair"
    # One measured on another pair says nothing of this one.
    others = [s for s in strengths if s.source == "published"] or strengths
    weakest = min(others, key=lambda s: (s.first, s.name)).name
    return weakest, f"acceptance of this pair not measured: the weakest class, {weakest}"


def size_names(shapes: PairShapes) -> str:
    """Sizes of a pair in words."""
    sizes = (shape.parameters if shape else None for shape in (shapes.target, shapes.draft))
    target, draft = map(size_name, sizes)
    drafter = NAMES[shapes.head] if shapes.head else "a draft"
    return f"a target of {target} and {drafter} of {draft} parameters"


def selection(
    entry: TreeEntry, source: str, batch_size: int, reasons: list[str], *, is_timed: bool
) -> Selection:
    """The selection, logged once."""
    schedule = entry.to_schedule()
    estimate = schedule.estimate(batch_size)
    reason = (
        f"tree {entry.name}: {entry.tree.size} nodes, depth {entry.tree.depth}, expected "
        f"{estimate.speedup:.2f}x plain decoding at batch size {estimate.batch_size} "
        f"({HOW_TIMED[entry.profile.source]}); " + "; ".join(reasons)
    )
    _log_once(reason)
    return Selection(
        name=entry.name,
        schedule=schedule,
        entry=entry,
        source=source,
        expected_tokens=estimate.expected_tokens,
        expected_speedup=estimate.speedup,
        reason=reason,
        is_timed=is_timed,
    )


@cache
def _log_once(line: str) -> None:
    logger.info("%s", line)
