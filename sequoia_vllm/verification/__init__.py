"""Drafting without replacement and tree verification (pure PyTorch)."""

from sequoia_vllm.verification.randomness import Generators
from sequoia_vllm.verification.sampling import (
    GREEDY_BELOW,
    draft_distribution,
    draw_without_replacement,
    sample_without_replacement,
)
from sequoia_vllm.verification.topology import Topology
from sequoia_vllm.verification.verifier import (
    VerifyResult,
    match_nodes,
    match_tree,
    verify_tree,
    walk_tree,
)

__all__ = [
    "GREEDY_BELOW",
    "Generators",
    "Topology",
    "VerifyResult",
    "draft_distribution",
    "draw_without_replacement",
    "match_nodes",
    "match_tree",
    "sample_without_replacement",
    "verify_tree",
    "walk_tree",
]
