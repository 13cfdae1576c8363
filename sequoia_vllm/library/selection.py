"""Which of a device's stored trees serves a model pair."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from sequoia_vllm.hardware.models import nearest_class
from sequoia_vllm.hardware.schedule import Schedule
from sequoia_vllm.library.files import LibraryError, TreeEntry
from sequoia_vllm.library.pair_key import PairKey, same_model
from sequoia_vllm.tree.token_tree import TokenTree

logger = logging.getLogger("vllm.sequoia.library")  # shown by vLLM's own handler


@dataclass(frozen=True)
class Selection:
    """The tree to use, and why.

    Attributes:
        name: Name of the entry; `load` takes it.
        schedule: The tree and its prefix by batch size.
        entry: Everything the tree was made from.
        source: "user" (tuned here), "measured" or "roofline" (shipped).
        expected_tokens: Tokens per request and step at the batch size asked for.
        expected_speedup: Against plain decoding at that batch size.
        reason: One line: what was chosen and why.
    """

    name: str
    schedule: Schedule
    entry: TreeEntry
    source: str
    expected_tokens: float
    expected_speedup: float
    reason: str

    @property
    def tree(self) -> TokenTree:
        """The whole stored tree; `schedule` says how much of it to draft."""
        return self.schedule.tree


def of_pair(
    entries: list[TreeEntry],
    pair: PairKey,
    target_parameters: float | None,
    draft_parameters: float | None,
) -> tuple[list[TreeEntry], str]:
    """The entries for a model pair, or for the class nearest to it in size, and why."""
    exact = [
        e for e in entries if same_model(e.target, pair.target) and same_model(e.draft, pair.draft)
    ]
    if exact:
        return exact, f"made for {exact[0].target} with {exact[0].draft}"
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


def of_strength(
    entries: list[TreeEntry],
    pair: PairKey,
    acceptance_class: str | None,
    temperature: float | None,
) -> tuple[list[TreeEntry], str]:
    """The entries of one draft strength class, and why this one.

    Raises:
        LibraryError: If the class asked for is not there; lists those that are.
    """
    if acceptance_class is not None:
        named = [e for e in entries if e.acceptance_class == acceptance_class]
        if not named:
            raise LibraryError(
                f"no acceptance class {acceptance_class!r} for model class "
                f"{entries[0].model_class}; there are "
                f"{', '.join(sorted({e.acceptance_class for e in entries}))}"
            )
        return named, f"acceptance class {acceptance_class} as asked"
    own = [
        e
        for e in entries
        if same_model(e.acceptance_target or "", pair.target)
        and same_model(e.acceptance_draft or "", pair.draft)
    ]
    if own:
        wanted = 0.0 if temperature is None else temperature
        nearest_one = min(own, key=lambda e: abs((e.temperature or 0.0) - wanted))
        name = nearest_one.acceptance_class
        return [e for e in own if e.acceptance_class == name], (
            f"acceptance {name} measured on this pair"
        )

    def strength(entry: TreeEntry) -> tuple[float, str]:
        row = entry.acceptance[0]
        return (row[0] if isinstance(row, list) else row), entry.acceptance_class

    weakest = min(entries, key=strength).acceptance_class
    return [e for e in entries if e.acceptance_class == weakest], (
        f"acceptance of this pair not measured: the weakest class, {weakest}"
    )


def selection(entry: TreeEntry, source: str, batch_size: int, reasons: list[str]) -> Selection:
    """The selection, logged once."""
    schedule = entry.to_schedule()
    estimate = schedule.estimate(batch_size)
    reason = (
        f"tree {entry.name}: {entry.tree.size} nodes, depth {entry.tree.depth}, expected "
        f"{estimate.speedup:.2f}x plain decoding at batch size {estimate.batch_size} "
        f"({'measured' if entry.profile.source == 'measured' else 'roofline, not measured'}); "
        + "; ".join(reasons)
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
    )


@cache
def _log_once(line: str) -> None:
    logger.info("%s", line)
