"""What kind of drafter a checkpoint is, by its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, get_args

from vllm import envs
from vllm.config.speculative import MTPModelTypes, SpeculativeConfig
from vllm.platforms import current_platform

from sequoia_vllm.config import ConfigError
from sequoia_vllm.drafters import NAMES, DrafterKind, is_head
from sequoia_vllm.engine.frontend.block_heads import block_problem, drafts_blocks, most_levels
from sequoia_vllm.engine.frontend.draft_config import DraftReader
from sequoia_vllm.engine.frontend.head_target import target_differences
from sequoia_vllm.engine.frontend.mtp_layers import check_mtp_layers


@dataclass(frozen=True)
class Recognised:
    """What a configuration says of a drafter.

    Attributes:
        kind: None: trees do not draft with it.
        name: In words, with an article.
        sign: What says so; none: nothing says that it is more than a model.
        method: vLLM's own method for it, if trees do not draft with it; None: not every vLLM
            that we support has one.
    """

    kind: DrafterKind | None
    name: str
    sign: str | None = None
    method: str | None = None


def drafter_kind(draft: str, reader: DraftReader) -> DrafterKind:
    """The kind of a checkpoint, which its path does not tell.

    Args:
        draft: Name or path.
        reader: Of the engine. What the user gave as ``drafter`` is checked, and needed where a
            head's configuration is that of a model.

    Raises:
        ConfigError: Trees do not draft with it, or it is not what ``drafter`` says, or it is
            a head that was made for another target; names what it is, and the fix.
    """
    given, target = reader.config.drafter, reader.target
    if given == "mtp":
        check_mtp_layers(target)
        return "mtp"
    try:
        head = reader.read(draft)
        found = recognise(head)
    except (OSError, ValueError, RuntimeError):
        return given or "model"  # vLLM reads it again, and says what is wrong with it
    kind = _agreed(found, draft, given)
    if is_head(kind):
        _check_target(head, draft, kind, target)
    if kind == "dflash":
        _check_block(head, draft)
    return kind


def drafted_levels(kind: DrafterKind | None, read: Callable[[], Any]) -> int | None:
    """How deep the trees are at most that a checkpoint of this kind drafts.

    Args:
        kind: None: trees do not draft with it.
        read: Its configuration, as `DraftReader` reads it; called only where that tells.

    Returns:
        None: any number, or it is not for us to say.
    """
    if kind is None or not drafts_blocks(kind):
        return None
    try:
        return most_levels(read(), kind)
    except (OSError, ValueError, RuntimeError):
        return None  # vLLM reads it again, and says what is wrong with it


def kinds_here() -> list[DrafterKind]:
    """What an engine of this process can draft with, as far as is known before its options are.

    Where options turn Model Runner V2 off, engines on GPUs are refused.
    """
    chosen = envs.VLLM_USE_V2_MODEL_RUNNER
    runs_v2 = current_platform.is_cuda() if chosen is None else chosen
    return [kind for kind in get_args(DrafterKind) if runs_v2 or not is_head(kind)]


def vllm_method(kind: DrafterKind) -> str:
    """vLLM's speculative method whose loading and scheduling trees of this kind take."""
    return "draft_model" if kind == "model" else kind


def check_method(kind: DrafterKind, draft: str, method: str) -> None:
    """Whether vLLM takes a draft model for one; it also goes by names and paths.

    Raises:
        ConfigError: It does not.
    """
    if kind == "mtp" and method != kind:
        raise ConfigError(
            f"vLLM takes {draft!r} for a drafter of its method {method!r} by its name: put it into "
            'a folder without "eagle-", "eagle3", "dflash" and "dspark" in its path'
        )
    if kind == "model" and method != "draft_model":
        raise ConfigError(
            f"vLLM takes {draft!r} for a drafter of its method {method!r} by its name: if it is a "
            'draft model, put it into a folder without "eagle-", "eagle3", "dflash" and "dspark" '
            'in its path; if it is an EAGLE-3 head, give "drafter": "eagle3", as its '
            "configuration does not say so; trees draft with no other heads"
        )


def _agreed(found: Recognised, draft: str, given: DrafterKind | None) -> DrafterKind:
    """What checkpoint and user say, if they agree."""
    sign = f" ({found.sign})" if found.sign else ""
    chains = f", or use vLLM's own method {found.method!r} for chains" if found.method else ""
    if found.kind is None:
        raise ConfigError(
            f'{draft!r} is {found.name}{sign}, which trees do not draft with: give "model" an '
            f"EAGLE-3 head or a draft model{chains}"
        )
    # Some EAGLE-3 heads have the configuration of a model; the others need more of theirs.
    if given in (None, found.kind):
        return found.kind
    if given == "eagle3" and found.sign is None:
        return given
    said = found.name if found.sign else "a model by its configuration"
    raise ConfigError(
        f'"drafter" is "{given}", but {draft!r} is {said}{sign}: leave "drafter" out, or give '
        f'"model" {NAMES[given]}'
    )


def _check_target(head: Any, draft: str, kind: DrafterKind, target: Any) -> None:
    differences = target_differences(head, target.hf_text_config)
    if differences:
        raise ConfigError(
            f"{draft!r} is {NAMES[kind]} made for another target than {target.model!r}: "
            f'{"; ".join(differences)}. Give "model" one that was trained for this target, or a '
            "draft model"
        )


def _check_block(head: Any, draft: str) -> None:
    if problem := block_problem(head):
        raise ConfigError(
            f"{draft!r} is {NAMES['dflash']} that {problem}, which neither trees nor vLLM's chains "
            'draft with: give "model" another head or a draft model'
        )


_OTHER_DSPARK = Recognised(
    None, "a DSpark head of another architecture than Qwen3's", None, "dspark"
)
_XPRESS = Recognised(None, "an XPress drafter, which refines the tokens of a block together")
# By whole architecture names, in this order; EAGLE-1 heads and MTP layers come last.
_ARCHITECTURES = (
    (r"P[Ee]agle.*", Recognised(None, "a P-EAGLE head, which drafts in parallel", None, "eagle3")),
    (r"Eagle3.*|.*Eagle3", Recognised("eagle3", NAMES["eagle3"])),
    (r".*XPress.*", _XPRESS),
    (r"Qwen3DSparkModel", Recognised("dspark", NAMES["dspark"])),
    (r".*DSpark.*", _OTHER_DSPARK),
    (r"DFlash2DraftModel", Recognised("dflash", "a DFlash2 head")),
    (r"LiLiCorrDraftModel", Recognised("dflash", "a LiLiCorr head")),
    (r"DFlash2.*", Recognised(None, "a DFlash2 head of another architecture", None, "dflash")),
    (r"DFlashLaguna.*", Recognised(None, "a DFlash head of Laguna", None, "dflash")),
    (r"DFlash.*|.*DFlash|MuseGlimmerAssistantModel", Recognised("dflash", NAMES["dflash"])),
    (r"Eagle.*", Recognised(None, "an EAGLE-1 head", None, "eagle")),
    (r"Medusa.*", Recognised(None, "a set of Medusa heads")),
    (r"MLPSpeculator.*", Recognised(None, "an MLP speculator")),
    (r".*MTP.*", Recognised(None, "a multi-token prediction (MTP) layer", None, "mtp")),
)  # fmt: skip
_TYPES = {
    "medusa": Recognised(None, "a set of Medusa heads"),
    "mlp_speculator": Recognised(None, "an MLP speculator"),
    **dict.fromkeys(
        get_args(MTPModelTypes),
        Recognised(None, "a model with multi-token prediction (MTP) layers", None, "mtp"),
    ),
}
# Fields that only such drafters have, where the architecture is that of a model; in this order.
_FIELDS = (
    ("markov_rank", _OTHER_DSPARK),
    ("dspark_block_size", _OTHER_DSPARK),
    ("dflash_config", Recognised("dflash", NAMES["dflash"])),
    ("draft_vocab_size", Recognised("eagle3", NAMES["eagle3"])),
    ("eagle_config", Recognised("eagle3", NAMES["eagle3"])),
    ("eagle_aux_hidden_state_layer_ids", Recognised("eagle3", NAMES["eagle3"])),
)
# Of heads that draft in parallel: the token that stands for those not drafted yet.
_PARALLEL = ("ptd_token_id", "pard_token")
# In a DFlash configuration: what only drafters have that were made of it, and draft otherwise.
_OF_SUCCESSORS = {
    "selector_rank": Recognised(None, "a DFlash2 head under the name of another architecture"),
    "projector_type": Recognised(None, "a Domino drafter, which vLLM does not run"),
}


def recognise(config: Any) -> Recognised:
    """What a configuration says of its checkpoint, as vLLM reads it (from neither name nor path).

    Args:
        config: As `DraftReader` reads it.
    """
    found = _by_architecture(config) or _by_type(config) or _by_field(config)
    if found is None:
        return Recognised("model", NAMES["model"])
    token = next((name for name in _PARALLEL if getattr(config, name, None) is not None), None)
    if found.kind == "eagle3" and token:
        return Recognised(
            None, "a P-EAGLE head, which drafts in parallel", f"it has {token}", "eagle3"
        )
    for key, successor in _OF_SUCCESSORS.items():
        if found.name == NAMES["dflash"] and key in (getattr(config, "dflash_config", None) or {}):
            return _with_sign(successor, f"it has {key}")
    return found


def _with_sign(found: Recognised, sign: str) -> Recognised:
    return Recognised(found.kind, found.name, sign, found.method)


def _by_architecture(config: Any) -> Recognised | None:
    for name in getattr(config, "architectures", None) or ():
        if name == "DSparkDraftModel" and getattr(config, "model_type", None) == "qwen3":
            return _with_sign(Recognised("dspark", NAMES["dspark"]), f"its architecture is {name}")
        for pattern, found in _ARCHITECTURES:
            if re.fullmatch(pattern, name):
                return _with_sign(found, f"its architecture is {name}")
    return None


def _by_type(config: Any) -> Recognised | None:
    """Medusa, and all that vLLM takes for layers of multi-token prediction."""
    named = getattr(config, "model_type", None)
    read = named
    if getattr(config, "architectures", None):
        read = SpeculativeConfig.hf_config_override(deepcopy(config)).model_type
    found = _TYPES.get(read)
    return found and _with_sign(found, f"its model_type is {named}")


def _by_field(config: Any) -> Recognised | None:
    for name, found in _FIELDS:
        if getattr(config, name, None) is not None:
            return _with_sign(found, f"it has {name}")
    return None
