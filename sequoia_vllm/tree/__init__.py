"""Token trees: topology, stored order, optimizer (pure Python and NumPy)."""

from sequoia_vllm.tree.acceptance import Acceptance, AcceptanceError
from sequoia_vllm.tree.limits import MOST_DYNAMIC_NODES, MOST_NODES, MOST_RECURRENT_NODES
from sequoia_vllm.tree.optimize import Frontier, optimize_tree
from sequoia_vllm.tree.token_tree import TokenTree, TreeError

__all__ = [
    "MOST_DYNAMIC_NODES", "MOST_NODES", "MOST_RECURRENT_NODES", "Acceptance", "AcceptanceError",
    "Frontier", "TokenTree", "TreeError", "optimize_tree",
]  # fmt: skip
