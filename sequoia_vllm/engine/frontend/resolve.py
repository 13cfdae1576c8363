"""Chooses the draft, the tree and the settings of one engine from what the user asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.registry import Drafter, DrafterKind, KnownDrafter, drafter, known_for
from sequoia_vllm.engine.common.cluster import current_versions
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend.drafts import ResolvedDraft, check_folder
from sequoia_vllm.engine.frontend.tree_choice import TreeChoice, choose_engine_tree
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.user_files import reason_not_to_keep
from sequoia_vllm.tree import TokenTree

logger = logging.getLogger("vllm.sequoia")


@dataclass(frozen=True)
class KnownDraft:
    """A known drafter of one target, and why it is taken, for the log."""

    name: str
    kind: DrafterKind
    why: str


@dataclass(frozen=True)
class Resolved:
    """The draft, tree and settings of a configuration, for one target on one device."""

    draft: ResolvedDraft
    choice: TreeChoice
    settings: SequoiaSettings

    @property
    def speculates(self) -> bool:
        """Whether there is anything to draft; if not, the engine decodes plainly."""
        return self.choice.tree.num_speculative_tokens > 0


def find_draft(
    config: SequoiaConfig,
    target: str,
    kinds: Collection[DrafterKind],
    kind_of: Callable[[str], DrafterKind],
) -> ResolvedDraft:
    """The draft that the configuration names, or the best known one of the target.

    Args:
        config: What the user gave.
        target: Name or path of the target model.
        kinds: What the engine can draft with, where the drafter is left to us.
        kind_of: Reads what a draft of this name is; see `DraftReader.kind`.

    Returns:
        Its name and kind.

    Raises:
        ConfigError: No draft is given, and none is known for this target; or a folder is
            given in which there is none; or a draft of a kind that cannot be used.
    """

    def found(name: str) -> ResolvedDraft:
        check_folder("draft", name)
        return ResolvedDraft(name, kind_of(name))

    if config.drafter is not None and drafter(config.drafter).is_targets_own:
        _check_runs(config.drafter, kinds)
        if config.model not in (None, target):
            raise ConfigError(
                f'"drafter": "{config.drafter}" drafts with a layer of the target\'s own '
                f'checkpoint, and "model" is {config.model!r}: leave "model" out, or "drafter"'
            )
        return found(target)
    if config.model:
        return found(config.model)
    _check_runs(config.drafter, kinds)
    candidates = known_drafts(target, kinds, config.drafter)
    for known in candidates:
        try:
            draft = found(known.name)
            break
        except ConfigError as error:
            if known is candidates[-1]:
                raise
            logger.warning("Sequoia: trying the next drafter that is known, as %s", error)
    logger.info("Sequoia: drafting with %s: %s", known.name, known.why)
    return draft


def resolve(
    config: SequoiaConfig,
    pair: PairKey,
    draft: ResolvedDraft,
    max_model_len: int | None = None,
) -> Resolved:
    """Chooses the tree of an engine, and what its workers need to know.

    Args:
        config: What the user gave, `SequoiaConfig.loaded`.
        pair: What the tree is for.
        draft: What drafts; the shapes say how much of the target is streamed.
        max_model_len: Longest request, in tokens; None: any.

    Raises:
        ConfigError: The tree is too deep for the draft, the schedule has more drafts than it,
            or the output layer of a head is to be trimmed.
        LibraryError: The device's trees cannot be read.
    """
    if config.draft_vocabulary and drafter(draft.kind).is_head:
        raise ConfigError(
            f'"draft_vocabulary" trims draft models, and {draft.name!r} is '
            f"{drafter(draft.kind).name}, which has the output layer it was trained with: leave "
            "the key out"
        )
    choice = choose_engine_tree(config, pair, draft.shapes, max_model_len, draft.levels)
    _check_depth(choice.tree, draft)
    settings = SequoiaSettings(
        tree=choice.tree,
        tree_source=choice.source,
        chosen_for=choice.device,
        versions=current_versions(),
        context_attention=config.context_attention,
        verification=config.verification or choice.verification,
        adapts_as=pair.file_name if config.adapts else None,
        expected_speedup=choice.gain.speedup,
        drafter=draft.kind,
        keeps=_can_keep(config),
    )
    return Resolved(draft, choice, settings)


def _can_keep(config: SequoiaConfig) -> bool:
    """Whether anything can be kept for the next start; logs it if not, where something would be."""
    reason = reason_not_to_keep()
    if reason is not None and (config.adapts or config.is_tree_chosen):
        logger.warning(
            "Sequoia: nothing that this engine learns is kept for its next start, and what was "
            "tuned or kept before is used only where it can be read: %s",
            reason,
        )
    return reason is None


def _check_depth(tree: TokenTree, draft: ResolvedDraft) -> None:
    """Checks that a draft goes as deep as a tree.

    Raises:
        ConfigError: It does not; names the fix.
    """
    if draft.levels is not None and tree.depth > draft.levels:
        raise ConfigError(
            f"the tree has {tree.depth} levels, and the {drafter(draft.kind).short_name} "
            f"{draft.name!r} drafts {draft.levels} at most, one for each position of its block "
            f"that predicts: choose a tree of depth {draft.levels} or less, such as "
            f'"tree": {{"size": {tree.size}, "depth": {draft.levels}}}'
        )


def _check_runs(kind: DrafterKind | None, kinds: Collection[DrafterKind]) -> None:
    if kind is not None and kind not in kinds:
        raise ConfigError(
            f'"drafter": "{kind}": {drafter(kind).name} needs vLLM\'s Model Runner V2, which GPUs '
            'use: leave "drafter" out here'
        )


# -- known drafters -------------------------------------------------------------------


def known_drafts(
    target: str, kinds: Collection[DrafterKind], asked: DrafterKind | None = None
) -> list[KnownDraft]:
    """The known drafters of this target that an engine may take, the best first.

    Args:
        target: Name or path.
        kinds: What the engine can run.
        asked: The kind that the user asks for; None: the kinds that are taken by default.

    Raises:
        ConfigError: None is known; shows the JSON to write instead.
    """
    taken = [
        kind for kind in kinds if asked == kind or (asked is None and drafter(kind).by_default)
    ]
    fitting = known_for(target)
    found = [
        KnownDraft(
            known.name_for(target), kind.kind,
            _why(kind, known, fitting[:place], kinds, taken),
        )
        for place, (kind, known) in enumerate(fitting)
        if kind.kind in taken
    ]  # fmt: skip
    if not found:
        raise ConfigError(_none_known(target, kinds, taken, fitting))
    return found


_Fitting = list[tuple[Drafter, KnownDrafter]]


def _none_known(
    target: str, kinds: Collection[DrafterKind], taken: Collection[DrafterKind], others: _Fitting
) -> str:
    """The message where only ``others`` are known, if any."""
    wanted = " or ".join(drafter(kind).short_name for kind in taken)
    named = f"no {wanted} is known for the target {target!r}"
    if others:
        kind, known = others[0]
        named += f", but {kind.name} ({known.draft})"
        if kind.by_default:
            named += ': leave "drafter" out for it'
        elif kind.kind in kinds:
            named += f": {_asked_for(kind)}"
        else:
            named += ", which needs vLLM's Model Runner V2 (GPUs use it)"
    which = "made for it" if "model" not in taken else "that has the same tokenizer"
    example = '--speculative-config \'{"method": "sequoia", "model": "DRAFT"}\''
    return f"{named}. Name one {which}: {example}"


def _asked_for(kind: Drafter) -> str:
    """Says how to choose a kind that is not taken by default."""
    return f'ask for it with "drafter": "{kind.kind}" (none with trained weights ran on a GPU)'


def _why(
    kind: Drafter,
    known: KnownDrafter,
    better: _Fitting,
    kinds: Collection[DrafterKind],
    taken: Collection[DrafterKind],
) -> str:
    """Says which draft was chosen and why, and why one expected to be faster was not."""
    words = f"{kind.name}, {known.note}"
    if kind.is_head:
        words = f"{kind.name} made for this target ({known.note})"
    for other, first in dict(reversed(better)).items():
        if other.kind not in taken:
            why_not = _asked_for(other) if other.kind in kinds else "not on this runner"
            words += f"; {other.name} exists, too ({first.draft}): {why_not}"
    return words
