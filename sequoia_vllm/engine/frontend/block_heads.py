"""What the configuration of a head that drafts blocks says of the trees that it can draft."""

from __future__ import annotations

from typing import Any

from sequoia_vllm.config import ConfigError
from sequoia_vllm.drafters import DrafterKind, short_name
from sequoia_vllm.tree.token_tree import TokenTree


def drafts_blocks(kind: DrafterKind) -> bool:
    """Whether one pass of such a head drafts all levels."""
    return kind in ("dflash", "dspark")


def most_levels(head: Any, kind: DrafterKind) -> int | None:
    """Levels of the deepest tree: a block is a position for each.

    The root's own is none of them, unless a DSpark head predicts the first level there.

    Args:
        head: As `DraftReader` reads it.
        kind: What it is.

    Returns:
        None: it does not say, and any number is drafted.
    """
    block = getattr(head, "block_size", None)
    if kind == "dspark":
        block = getattr(head, "dspark_block_size", None) if block is None else block
        predicts = getattr(head, "sample_from_anchor", True)
    else:
        predicts = False
    return None if block is None else max(int(block) - (0 if predicts else 1), 1)


def block_problem(head: Any) -> str | None:
    """What vLLM does not run of a DFlash head's blocks either, or None."""
    of_blocks = getattr(head, "dflash_config", None) or {}
    if of_blocks.get("sample_from_anchor"):
        return "drafts its first token at the root's own position"
    return None


def check_depth(tree: TokenTree, levels: int | None, draft: str, kind: DrafterKind) -> None:
    """Whether a head goes as deep as a tree.

    Raises:
        ConfigError: It does not; names the fix.
    """
    if levels is None or tree.depth <= levels:
        return
    raise ConfigError(
        f"the tree has {tree.depth} levels, and the {short_name(kind)} {draft!r} "
        f"drafts {levels} at most (so many positions of its block predict one): choose a tree of "
        f'depth {levels} or less, such as "tree": {{"size": {tree.size}, "depth": {levels}}}'
    )
