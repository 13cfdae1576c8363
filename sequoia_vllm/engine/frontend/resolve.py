"""From what the user asked for to a draft, a tree and the settings of one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters import MODELS_ONLY, NAMES, DrafterKind
from sequoia_vllm.engine.common.cluster import current_versions
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend.block_heads import check_depth
from sequoia_vllm.engine.frontend.draft_checks import check_folder
from sequoia_vllm.engine.frontend.tree_choice import TreeChoice, choose_engine_tree
from sequoia_vllm.hardware.models import PairShapes
from sequoia_vllm.known_pairs import known_drafts
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.user_files import reason_not_to_keep

logger = logging.getLogger("vllm.sequoia")


@dataclass(frozen=True)
class Resolved:
    """What a configuration comes to for one target on one device.

    Attributes:
        draft: Name or path of the draft.
        drafter: What it is.
        choice: The tree, and how much of it to draft at which batch size.
        settings: What the workers read of it.
    """

    draft: str
    drafter: DrafterKind
    choice: TreeChoice
    settings: SequoiaSettings

    @property
    def speculates(self) -> bool:
        """Whether there is anything to draft; if not, the engine decodes plainly."""
        return self.choice.tree.num_speculative_tokens > 0


def resolve(
    config: SequoiaConfig,
    *,
    device: str,
    target: str,
    dtype: str,
    tensor_parallel_size: int,
    kinds: Collection[DrafterKind] = MODELS_ONLY,
    read_kind: Callable[[str], DrafterKind] | None = None,
    read_levels: Callable[[str, DrafterKind], int | None] | None = None,
    read_shapes: Callable[[str, DrafterKind], PairShapes] | None = None,
    max_model_len: int | None = None,
    offloading: str | None = None,
) -> Resolved:
    """Finds the draft and the tree that this configuration names or leaves to us.

    Args:
        config: What the user gave.
        device: Name of the device that the engine will run on.
        target: Name or path of the target model.
        dtype: The target's, such as "bfloat16".
        tensor_parallel_size: Devices per engine.
        kinds: What the engine can draft with, where the drafter is left to us.
        read_kind: Reads what a draft is; None: what the user says, or a model.
        read_levels: Reads how many levels this draft of this kind drafts at most, None: any
            number; None: any.
        read_shapes: Reads the shapes of the target and of this draft of this kind, if the choice
            depends on them; None: they are not known.
        max_model_len: Longest request, in tokens; None: any.
        offloading: See `PairKey`; shapes then say how much of the target is streamed.

    Raises:
        ConfigError: No draft is given, and none is known for this target; or a folder is
            given in which there is none; or a draft of a kind that cannot be used, or a tree
            that is too deep for it.
        TreeError, AcceptanceError, LibraryError: The tree cannot be had; names the file
            or entry and what is wrong with it.
    """

    def kind_of(draft: str) -> DrafterKind:
        check_folder("draft", draft)
        return read_kind(draft) if read_kind else config.drafter or "model"

    draft = _own_layers(target, config, kinds) if config.drafter == "mtp" else config.model
    draft = draft or _known_draft(target, config, kinds, kind_of)
    drafter = kind_of(draft)
    pair = PairKey(
        device=device,
        target=target,
        draft=draft,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        offloading=offloading,
    )
    shapes = cache(lambda: read_shapes(draft, drafter)) if read_shapes else None
    levels = read_levels(draft, drafter) if read_levels else None
    choice = choose_engine_tree(config, pair, shapes, max_model_len, levels)
    check_depth(choice.tree, levels, draft, drafter)
    settings = SequoiaSettings(
        tree=choice.tree,
        tree_source=choice.source,
        chosen_for=choice.device,
        versions=current_versions(),
        context_attention=config.context_attention,
        verification=config.verification or choice.verification,
        adapts_as=pair.file_name if config.adapts else None,
        expected_speedup=choice.gain.speedup,
        drafter=drafter,
        keeps=_can_keep(config),
    )
    return Resolved(draft, drafter, choice, settings)


def _can_keep(config: SequoiaConfig) -> bool:
    """Whether anything can be kept for the next start; says so where not, if it would be."""
    reason = reason_not_to_keep()
    if reason is not None and (config.adapts or config.is_tree_chosen):
        logger.warning(
            "Sequoia: nothing that this engine learns is kept for its next start, and what was "
            "tuned or kept before is used only where it can be read: %s",
            reason,
        )
    return reason is None


def _known_draft(
    target: str,
    config: SequoiaConfig,
    kinds: Collection[DrafterKind],
    kind_of: Callable[[str], DrafterKind],
) -> str:
    """The best one of the table that the engine and the user take, and that trees draft with."""
    _check_runs(config.drafter, kinds)
    *better, last = known_drafts(target, kinds if config.drafter is None else (config.drafter,))
    known = next((draft for draft in better if _is_usable(draft.name, kind_of)), last)
    logger.info("Sequoia: drafting with %s: %s", known.name, known.why)
    return known.name


def _own_layers(target: str, config: SequoiaConfig, kinds: Collection[DrafterKind]) -> str:
    """The checkpoint that drafts for itself."""
    _check_runs(config.drafter, kinds)
    if config.model not in (None, target):
        raise ConfigError(
            f'"drafter": "mtp" drafts with a layer of the target\'s own checkpoint, and "model" is '
            f'{config.model!r}: leave "model" out, or "drafter"'
        )
    return target


def _check_runs(drafter: DrafterKind | None, kinds: Collection[DrafterKind]) -> None:
    if drafter is not None and drafter not in kinds:
        raise ConfigError(
            f'"drafter": "{drafter}": {NAMES[drafter]} needs vLLM\'s Model Runner V2, which GPUs '
            'use: leave "drafter" out here'
        )


def _is_usable(draft: str, kind_of: Callable[[str], DrafterKind]) -> bool:
    """Whether its configuration allows trees; says so where not, as another one is taken."""
    try:
        kind_of(draft)
    except ConfigError as error:
        logger.warning("Sequoia: trying the next drafter that is known, as %s", error)
        return False
    return True
