"""Chooses the draft of an engine: the one that the user names, or the best known of its target."""

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.registry import Drafter, KnownDrafter, drafter, known_for
from sequoia_vllm.model_source import folder_problem

logger = logging.getLogger("vllm.sequoia")


class KnownDraft(NamedTuple):
    """A known drafter of one target, and why it is taken, for the log."""

    name: str
    drafter: Drafter
    why: str


def find_draft(
    config: SequoiaConfig,
    target: str,
    kinds: Collection[Drafter],
    kind_of: Callable[[str], Drafter],
    own_layer: Callable[[], Drafter | None] = lambda: None,
) -> tuple[str, Drafter]:
    """The draft that the configuration names, or the best known one of the target, and its kind.

    Where none is known and the user asks for no kind, a layer of the target's own checkpoint
    drafts, by the target's name. Where it has none, a kind without weights drafts, by its name.

    Args:
        kinds: What the engine can draft with, where the drafter is left to us.
        kind_of: Reads what a draft of this name is; see `DraftReader.kind`.
        own_layer: Reads whether the target has a layer that drafts; see `DraftReader.own_layer`.

    Raises:
        ConfigError: There is no draft, or it cannot be used.
    """

    def found(name: str) -> tuple[str, Drafter]:
        if problem := folder_problem("draft", name):
            raise ConfigError(problem)
        return name, kind_of(name)

    asked = None if config.drafter is None else drafter(config.drafter)
    if asked is not None and (asked.is_targets_own or not config.model) and asked not in kinds:
        raise ConfigError(
            f'"drafter": "{asked.kind}": {asked.name} needs vLLM\'s Model Runner V2, which GPUs '
            'use: leave "drafter" out here'
        )
    if asked is not None and (asked.is_targets_own or not asked.has_weights):
        own = target if asked.is_targets_own else None
        how = "with a layer of the target's own checkpoint" if own else "without a model"
        if config.model not in (None, own):
            raise ConfigError(
                f'"drafter": "{asked.kind}" drafts {how}, and "model" is {config.model!r}: leave '
                '"model" out, or "drafter"'
            )
        return found(own) if own else (asked.kind, asked)
    if config.model:
        return found(config.model)
    candidates, has_model = known_drafts(target, kinds, asked), False
    problem = candidates
    if not isinstance(candidates, str):
        has_model = any(not known.drafter.is_head for known in candidates)
        try:
            return _first_usable(candidates, found)
        except ConfigError as error:
            problem = str(error)
    if asked is not None or has_model:
        raise ConfigError(problem)
    drafts_own = any(kind.is_targets_own for kind in kinds)
    if drafts_own and (layer := own_layer()) is not None and layer in kinds:
        name = f"{layer.name} of the target's own checkpoint"
        logger.info("Sequoia: drafting with %s, as %s", name, problem)
        return target, layer
    fallback = next((kind for kind in kinds if not kind.has_weights), None)
    if fallback is None:
        raise ConfigError(problem)
    logger.info("Sequoia: drafting with %s, as %s", fallback.name, problem)
    return fallback.kind, fallback


def _first_usable(
    candidates: list[KnownDraft], found: Callable[[str], tuple[str, Drafter]]
) -> tuple[str, Drafter]:
    """The first known draft that trees draft with; raises what is wrong with the last if none is.

    A head whose configuration cannot be read counts as a model: there may be another one.
    """
    for known in candidates:
        try:
            draft = found(known.name)
            if known.drafter.is_head and not draft[1].is_head:
                raise ConfigError(f"the configuration of {known.name} cannot be read as a head's")
            break
        except ConfigError as error:
            if known is candidates[-1]:
                raise
            logger.warning("Sequoia: trying the next drafter that is known, as %s", error)
    logger.info("Sequoia: drafting with %s: %s", known.name, known.why)
    return draft


def known_drafts(
    target: str, kinds: Collection[Drafter], asked: Drafter | None = None
) -> list[KnownDraft] | str:
    """The known drafters that an engine may take, the best first; or a message, with the fix."""
    taken = [kind for kind in kinds if asked is kind or (asked is None and kind.by_default)]
    fitting = known_for(target)
    found = [
        KnownDraft(known.name_for(target), kind, _why(kind, known, fitting[:place], kinds, taken))
        for place, (kind, known) in enumerate(fitting)
        if kind in taken
    ]
    return found or _none_known(target, kinds, taken, fitting)


_Fitting = list[tuple[Drafter, KnownDrafter]]


def _none_known(
    target: str, kinds: Collection[Drafter], taken: Collection[Drafter], others: _Fitting
) -> str:
    wanted = " or ".join(kind.short_name for kind in taken)
    named = f"no {wanted} is known for the target {target!r}"
    if others:
        kind, known = others[0]
        named += f", but {kind.name} ({known.draft})"
        if kind.by_default:
            named += ': leave "drafter" out for it'
        elif kind in kinds:
            named += f": {_asked_for(kind)}"
        else:
            named += ", which needs vLLM's Model Runner V2 (GPUs use it)"
    takes_models = any(not kind.is_head for kind in taken)
    which = "that has the same tokenizer" if takes_models else "made for it"
    example = '--speculative-config \'{"method": "sequoia", "model": "DRAFT"}\''
    return f"{named}. Name one {which}: {example}"


def _asked_for(kind: Drafter) -> str:
    """Says how to choose a kind that is not taken by default."""
    return f'ask for it with "drafter": "{kind.kind}" (none with trained weights ran on a GPU)'


def _why(
    kind: Drafter,
    known: KnownDrafter,
    better: _Fitting,
    kinds: Collection[Drafter],
    taken: Collection[Drafter],
) -> str:
    """Says which draft was chosen and why, and why one expected to be faster was not."""
    words = f"{kind.name}, {known.note}"
    if kind.is_head:
        words = f"{kind.name} made for this target ({known.note})"
    for other, first in dict(reversed(better)).items():
        if other not in taken:
            why_not = _asked_for(other) if other in kinds else "not with this engine's options"
            words += f"; {other.name} exists, too ({first.draft}): {why_not}"
    return words
