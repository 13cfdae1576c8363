"""What a DFlash head's configuration says of the trees that it can draft."""

from __future__ import annotations

from typing import Any

from sequoia_vllm.config import ConfigError
from sequoia_vllm.tree.token_tree import TokenTree

_SLIDING = "sliding_attention"


def most_levels(head: Any) -> int | None:
    """Levels of the deepest tree: a block is a position for each, and the root's.

    Args:
        head: As `read_draft_config` returns it.

    Returns:
        None: it does not say, and any number is drafted.
    """
    block = getattr(head, "block_size", None)
    return None if block is None else max(int(block) - 1, 1)


def attention_problem(head: Any) -> str | None:
    """How its layers attend where trees do not; None: to everything, as trees need.

    As vLLM reads it: ``qwen3_dflash._resolve_layer_attention``.
    """
    of_blocks = getattr(head, "dflash_config", None) or {}
    types = getattr(head, "layer_types", None) or ()
    slides = _SLIDING in types or bool(of_blocks.get("use_swa"))
    if slides:
        return "has layers with a sliding window"
    causal = getattr(head, "is_causal", None)
    causal = of_blocks.get("causal") if causal is None else causal
    if causal:
        return "has causal layers"
    if of_blocks.get("sample_from_anchor"):
        return "drafts its first token at the root's own position"
    return None


def check_depth(tree: TokenTree, levels: int | None, draft: str) -> None:
    """Whether a head goes as deep as a tree.

    Raises:
        ConfigError: It does not; names the fix.
    """
    if levels is None or tree.depth <= levels:
        return
    raise ConfigError(
        f"the tree has {tree.depth} levels, and the DFlash head {draft!r} drafts {levels} at most "
        f"(its block has {levels + 1} positions): choose a tree of depth {levels} or less, such as "
        f'"tree": {{"size": {tree.size}, "depth": {levels}}}'
    )
