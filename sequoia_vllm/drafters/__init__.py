"""Kinds of drafters: models of their own, heads of a target, layers of its checkpoint.

Nothing here imports vLLM. A module of `kinds` has all that is known of a kind: names, how its
configuration is recognised, its shape, published checkpoints, and which class drafts with it.
"""

from sequoia_vllm.drafters.fields import Fields, ShapeError
from sequoia_vllm.drafters.registry import (
    DRAFTERS,
    Drafter,
    DrafterKind,
    HeadShape,
    KnownDrafter,
    Sign,
    drafter,
    known_for,
    register,
    register_own_kinds,
)

register_own_kinds()

__all__ = [
    "DRAFTERS",
    "Drafter",
    "DrafterKind",
    "Fields",
    "HeadShape",
    "KnownDrafter",
    "ShapeError",
    "Sign",
    "drafter",
    "known_for",
    "register",
]
