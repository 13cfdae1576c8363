"""Kinds of drafters: what a checkpoint is that trees are grown with."""

from __future__ import annotations

from typing import Literal

HeadKind = Literal["eagle3", "dflash", "dspark", "mtp"]
"""Heads read the target's hidden states, and share its embedding; one of "mtp" is a layer that
the target's own checkpoint has."""
DrafterKind = Literal["model", "eagle3", "dflash", "dspark", "mtp"]
"""A model of its own, or a head."""

NAMES: dict[DrafterKind, str] = {
    "model": "a draft model",
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
    "mtp": "a multi-token prediction (MTP) layer",
}

MODELS_ONLY: tuple[DrafterKind, ...] = ("model",)
"""What every engine can draft with."""


def is_head(kind: DrafterKind) -> bool:
    """Whether it runs on its target's hidden states, embedding and tokens, and not alone."""
    return kind != "model"


def short_name(kind: DrafterKind) -> str:
    """Of `NAMES`, without the article."""
    return NAMES[kind].partition(" ")[2]
