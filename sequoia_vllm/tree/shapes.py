"""Tree shapes that others use, to compare with."""

from __future__ import annotations

from sequoia_vllm.tree.token_tree import TokenTree, TreeError


def independent_sequences(count: int, size: int) -> TokenTree:
    """``count`` chains from the root, as long as each other within one node.

    The shape of SpecInfer's sequences; one sequence is a chain. Nodes are
    stored level by level, so that every prefix is a tree.

    Args:
        count: Sequences; at most ``size - 1`` of them get a node.
        size: Nodes, root included.

    Raises:
        TreeError: If either is below 1.
    """
    if count < 1 or size < 1:
        raise TreeError(f"{count} sequences in {size} nodes: both must be at least 1")
    parents = [max(0, node - count) for node in range(1, size)]
    return TokenTree((-1, *parents))
