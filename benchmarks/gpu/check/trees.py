"""The trees that are grown and verified here."""

from sequoia_vllm.tree import TokenTree, optimize_tree
from sequoia_vllm.tree.acceptance import REFERENCE_ACCEPTANCE


def best_tree(size: int, depth: int) -> TokenTree:
    """The best tree of this size for the authors' published acceptance vector."""
    return optimize_tree(REFERENCE_ACCEPTANCE, size, depth)


def first_path_depth(tree: TokenTree) -> int:
    """Depth that is reached by first children alone."""
    node, depth = 0, 0
    while tree.children[node]:
        node, depth = tree.children[node][0], depth + 1
    return depth
