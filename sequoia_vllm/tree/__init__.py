"""Token trees: topology, stored order, optimizer (pure Python and NumPy)."""

from sequoia_vllm.tree.acceptance import Acceptance, AcceptanceError
from sequoia_vllm.tree.optimize import Frontier, optimize_tree
from sequoia_vllm.tree.token_tree import MOST_NODES, TokenTree, TreeError

__all__ = [
    "MOST_NODES", "Acceptance", "AcceptanceError", "Frontier", "TokenTree", "TreeError",
    "optimize_tree",
]  # fmt: skip
