"""Resolves the ``tree`` setting: the tree that an engine drafts, how much of it when, and why."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sequoia_vllm.config import AUTO, ConfigError, Schedule, SequoiaConfig, TreeSpec
from sequoia_vllm.drafters.registry import Drafter, drafts_from_text
from sequoia_vllm.hardware.device import identify
from sequoia_vllm.hardware.step_profile import HOW_TIMED
from sequoia_vllm.library.files import LibraryError, TreeEntry
from sequoia_vllm.library.pair_key import PairKey, PairShapes
from sequoia_vllm.library.selection import Selection
from sequoia_vllm.library.tree_library import NamedTree, TreeLibrary
from sequoia_vllm.tree import Acceptance, TokenTree, optimize_tree
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE

USER = "user"  # names of trees that were tuned here begin so
DEFAULT_TREE = TreeSpec(size=16, depth=4)
DEFAULT_TREE_WITHOUT_PASSES = TreeSpec(size=16, depth=8)
# Where a pass waits for weights, scoring more nodes costs little.
DEFAULT_TREE_OFFLOADED = TreeSpec(size=64, depth=8)
# Requests near their longest length draft less, so trees must be small compared with it.
_LENGTH_PER_NODE = 4
# Beyond these a CPU's step grows with each node, and the last of them are hardly ever accepted.
_MOST_ON_CPUS = 64

LibraryAnswer = Selection | LibraryError | None
"""See `look_up`."""


@dataclass(frozen=True)
class ExpectedGain:
    """What a tree is expected to bring."""

    speedup: float | None = None  # against plain decoding at batch size 1; None: not known
    source: str = ""  # how ``speedup`` is known, such as "measured"
    tokens: float | None = None  # per step; None: not known
    made_for: str | None = None
    """Another device that the tree was made for; None: it was made for this one, or for none."""


@dataclass(frozen=True)
class TreeChoice:
    """A tree and how much of it to draft."""

    tree: TokenTree  # size 1: do not speculate
    source: str  # where it came from, for the log
    schedule: list[tuple[int, int, int]] | None = None
    """Drafts by batch size, (first, last, drafts); None: the whole tree at every batch size."""
    device: str | None = None  # the device whose measurements or datasheet chose it; None: none did
    gain: ExpectedGain = field(default_factory=ExpectedGain)  # its expected gain


@dataclass(frozen=True)
class Facts:
    """What is known of one engine's models and machine before it is configured."""

    pair: PairKey  # its models, on its device
    drafter: Drafter  # what the draft is
    levels: int | None = None  # levels of the deepest tree that the draft drafts; None: any number
    most_nodes: int | None = None  # nodes of the largest tree over the target's layers; None: any
    library: LibraryAnswer = None  # what the library answers, see `look_up`
    max_model_len: int | None = None  # longest request, in tokens; None: any
    file_name: str = ""  # what the pair's files are called, see `PairKey.file_name`
    on_cpu: bool = False  # whether it runs on CPUs
    on_v2: bool = False  # whether it takes vLLM's Model Runner V2
    worker_cls: str = "auto"  # the worker that the user names; "auto": none
    versions: Mapping[str, str] = field(default_factory=dict)  # the plugin's and vLLM's
    not_kept: str | None = None  # why it can keep nothing for its next start; None: it can
    is_apart: bool = False  # whether several commands start its ranks, and each chooses a tree
    shares_files: bool = True  # whether the user named a directory for trees, perhaps shared


def look_up(
    config: SequoiaConfig, pair: PairKey, shapes: PairShapes | None = None
) -> LibraryAnswer:
    """Asks the library for the tree of a pair, if the tree is left to us.

    For drafts without weights it has only the trees that the user tuned.

    Returns:
        Its answer, or the error that says why it has none; None: it was not asked.
    """
    if not config.is_tree_chosen:
        return None
    try:
        library = TreeLibrary()
        if drafts_from_text(pair.draft):
            return library.tuned(pair) or LibraryError(
                "the library has trees for models and heads: tune one (sequoia-vllm tune)"
            )
        return library.select(pair, shapes)
    except LibraryError as error:
        return error


def choose_engine_tree(config: SequoiaConfig, facts: Facts) -> TreeChoice:
    """Resolves the configuration's tree, with its bounds and schedule applied.

    A tree that we choose is no deeper than the draft's levels. It has no more nodes than layers
    take, and no more than a quarter of the longest request's tokens.

    Raises:
        ConfigError: The given schedule has more drafts than the given tree.
    """
    choice = _resolve(config, facts)
    if config.is_tree_chosen and facts.max_model_len is not None:
        most = max(facts.max_model_len // _LENGTH_PER_NODE, 1)
        choice = _within(choice, most, "requests are short here")
    if config.is_tree_chosen and facts.most_nodes is not None:
        choice = _within(choice, facts.most_nodes, "recurrent layers take no more")
    if config.num_speculative_tokens is not None:
        choice = replace(choice, tree=choice.tree.trim(config.num_speculative_tokens + 1))
    if config.num_speculative_tokens_per_batch_size is not None:
        choice = replace(choice, schedule=_given_schedule(config, choice.tree))
    return choice


def _given_schedule(config: SequoiaConfig, tree: TokenTree) -> Schedule:
    """The user's schedule; more drafts than the tree has are cut where the tree is our choice."""
    schedule = config.num_speculative_tokens_per_batch_size or []
    most = tree.num_speculative_tokens
    too_many = next((list(entry) for entry in schedule if entry[2] > most), None)
    if too_many is None or config.tree in (None, AUTO):
        return [(first, last, min(drafts, most)) for first, last, drafts in schedule]
    bound = config.num_speculative_tokens
    cut = f" (num_speculative_tokens is {bound})" if bound == most else ""
    raise ConfigError(
        f"num_speculative_tokens_per_batch_size: {too_many} drafts more than the {most} that the "
        f"tree has{cut}: give at most {most}, or a larger tree"
    )


def _resolve(config: SequoiaConfig, facts: Facts) -> TreeChoice:
    pair, found, levels = facts.pair, facts.library, facts.levels
    vector, own = config.acceptance, facts.drafter.acceptance
    if vector is None:
        vector = REFERENCE_ACCEPTANCE if own is None else Acceptance.of(own)
    assert isinstance(vector, Acceptance)  # by `SequoiaConfig.loaded`
    if isinstance(config.tree, TreeSpec):
        deepest = levels if config.tree.depth is None else config.tree.depth
        given = config.tree.model_copy(update={"depth": deepest})
        return _optimal(vector, given, "optimal for the given size")
    if isinstance(config.tree, NamedTree):
        return TreeChoice(config.tree.tree, config.tree.title, gain=_gain_of(config.tree, pair))
    default_tree = DEFAULT_TREE if pair.offloading is None else DEFAULT_TREE_OFFLOADED
    if not facts.drafter.has_weights:
        default_tree = DEFAULT_TREE_WITHOUT_PASSES
    if levels is not None:
        depth = min(default_tree.depth or levels, levels)
        default_tree = default_tree.model_copy(update={"depth": depth})
    if config.acceptance is not None:
        return _optimal(vector, default_tree, "optimal for the given acceptance")
    if not isinstance(found, Selection):
        return _optimal(vector, default_tree, f"default size; {found}")
    entry, gain = found.entry, _expected(found.entry)
    choice = TreeChoice(entry.tree, found.reason, list(entry.schedule), pair.device, gain)
    if levels is not None and choice.tree.depth > levels:
        why = f"default size; the draft drafts {levels} levels at most, fewer than {choice.source}"
        return _optimal(vector, default_tree, why)
    if choice.tree.size == 1 and config.tree is None:
        why = "default size; speculation is expected not to pay here "
        why += f'("tree": "{AUTO}" turns it off): {choice.source}'
        return replace(_optimal(vector, default_tree, why), gain=choice.gain)
    return choice


def _gain_of(found: NamedTree, pair: PairKey) -> ExpectedGain:
    """The gain of a tree that the user named, known if it was made for this device."""
    entry = found.entry
    if entry is None or (pair.offloading is not None and entry.streamed is None):
        # A tree for weights in memory also pays where they are streamed, but nobody knows how much.
        vector = found.acceptance
        return ExpectedGain(tokens=None if vector is None else found.tree.expected_tokens(vector))
    if pair.offloading is None and entry.streamed is not None:
        return ExpectedGain(made_for="targets that are offloaded")
    made_for = entry.name.split("/")[0]
    if made_for in (USER, identify(pair.device).id):
        return _expected(entry)
    return ExpectedGain(made_for=made_for)


def _expected(entry: TreeEntry) -> ExpectedGain:
    estimate, source = entry.estimates[0], HOW_TIMED[entry.profile.source]
    return ExpectedGain(estimate.speedup, source, estimate.expected_tokens)


def _within(choice: TreeChoice, most_nodes: int, why: str) -> TreeChoice:
    """The first ``most_nodes`` nodes of a larger tree, at every batch size."""
    if choice.tree.size <= most_nodes:
        return choice
    schedule = [
        (first, last, min(drafts, most_nodes - 1)) for first, last, drafts in choice.schedule or ()
    ]
    source = f"{choice.source}; its first {most_nodes} nodes, as {why}"
    return replace(
        choice, tree=choice.tree.trim(most_nodes), schedule=schedule or None, source=source
    )


def _optimal(acceptance: Acceptance, spec: TreeSpec, why: str) -> TreeChoice:
    tree = optimize_tree(acceptance, spec.size, spec.depth, spec.branch)
    expected = tree.expected_tokens(acceptance)
    return TreeChoice(
        tree,
        f"{why}; {expected:.2f} tokens per step if acceptance is as assumed",
        gain=ExpectedGain(tokens=expected),
    )


def gain_line(
    gain: ExpectedGain, draft: str, size: int, depth: int, *, adapts: bool, on_cpu: bool
) -> tuple[int, str]:
    """The level of the logging module, and one line for the log.

    WARNING: the user forces drafts that may well not pay. ``draft`` is what it is, and its name.
    """
    doubt = None
    if gain.speedup is not None and gain.speedup <= 1:
        doubt = "expected not to pay here"
    elif gain.made_for is not None:
        doubt = f"made for {gain.made_for}, and may not pay here"
    elif on_cpu and size > _MOST_ON_CPUS and gain.speedup is None:
        doubt = f"more drafts than usually pay on CPUs, {_MOST_ON_CPUS - 1}"
    if doubt is not None:
        words = doubt
    elif gain.speedup is not None:
        words = f"expected {gain.speedup:.2f}x plain decoding, one request ({gain.source})"
    elif gain.tokens is not None:
        words = f"expected {gain.tokens:.2f} tokens per step, if acceptance is as assumed"
    else:
        words = "what it brings is not known before it runs"
    line = f"{draft}; up to {size - 1} drafts, depth {depth}: {words}"
    if adapts:
        return logging.INFO, f"{line}; drafts as many as measurements show to pay"
    if doubt is None:
        return logging.INFO, line
    return logging.WARNING, f'{line}; it drafts all the same, as "adapt" or a schedule fixes that'
