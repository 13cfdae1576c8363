"""Drafting without replacement and tree verification, without vLLM."""

from sequoia_vllm.verification.randomness import Generators
from sequoia_vllm.verification.replaced import verify_replaced
from sequoia_vllm.verification.result import Method, VerifyResult
from sequoia_vllm.verification.sampling import (
    GREEDY_BELOW,
    draft_distribution,
    draw_without_replacement,
    sample_without_replacement,
)
from sequoia_vllm.verification.topology import Topology
from sequoia_vllm.verification.traversal import traverse_tree
from sequoia_vllm.verification.traversal_compiled import load_traversal
from sequoia_vllm.verification.truncation import Truncation, lower_outside
from sequoia_vllm.verification.verifier import (
    METHODS,
    match_nodes,
    match_tree,
    verify_tree,
    walk_tree,
)

__all__ = [
    "GREEDY_BELOW",
    "METHODS",
    "Generators",
    "Method",
    "Topology",
    "Truncation",
    "VerifyResult",
    "draft_distribution",
    "draw_without_replacement",
    "load_traversal",
    "lower_outside",
    "match_nodes",
    "match_tree",
    "sample_without_replacement",
    "traverse_tree",
    "verify_replaced",
    "verify_tree",
    "walk_tree",
]
