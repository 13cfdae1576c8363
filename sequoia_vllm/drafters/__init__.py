"""Kinds of drafters: models of their own, heads of a target, layers of its checkpoint.

Nothing here imports vLLM. A module of `kinds` has everything about one kind: names, how its
configuration is recognised, its shape, published checkpoints, and which class drafts with it.
"""

from sequoia_vllm.drafters.registry import Drafter, register, register_own_kinds

register_own_kinds()

__all__ = ["Drafter", "register"]
