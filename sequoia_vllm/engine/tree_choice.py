"""From the ``tree`` setting to the tree that an engine drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sequoia_vllm.config import SequoiaConfig, TreeSpec
from sequoia_vllm.tree import Acceptance, TokenTree, optimize_tree
from sequoia_vllm.tree.published import REFERENCE_ACCEPTANCE

DEFAULT_TREE = TreeSpec(size=16, depth=5)


@dataclass(frozen=True)
class TreeChoice:
    """A tree, drafts by batch size (None: the whole tree always), and where they came from."""

    tree: TokenTree
    source: str
    schedule: list[tuple[int, int, int]] | None = None


def choose_engine_tree(
    config: SequoiaConfig, draft: str, target_model_config: Any, parallel_config: Any
) -> TreeChoice:
    """Resolves ``config.tree`` and applies ``num_speculative_tokens`` to it.

    Raises:
        TreeError, AcceptanceError: Naming the file and what is wrong with it.
    """
    tree, source = _resolve(config)
    if config.num_speculative_tokens is not None:
        tree = tree.trim(config.num_speculative_tokens + 1)
    return TreeChoice(tree, source, config.num_speculative_tokens_per_batch_size)


def _resolve(config: SequoiaConfig) -> tuple[TokenTree, str]:
    if isinstance(config.tree, str) and config.tree != "auto":
        return TokenTree.load(config.tree), config.tree
    spec = config.tree if isinstance(config.tree, TreeSpec) else DEFAULT_TREE
    acceptance = _acceptance(config)
    tree = optimize_tree(acceptance, spec.size, spec.depth, spec.branch)
    expected = tree.expected_tokens(acceptance)
    return tree, f"optimal for the given size, {expected:.2f} tokens per step expected"


def _acceptance(config: SequoiaConfig) -> Acceptance:
    if config.acceptance is None:
        return REFERENCE_ACCEPTANCE
    if isinstance(config.acceptance, Path):
        return Acceptance.load(config.acceptance)
    return Acceptance.of(config.acceptance)
