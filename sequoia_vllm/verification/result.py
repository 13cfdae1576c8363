"""What verification is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sequoia_vllm.verification.topology import Topology

Method = Literal["sequoia", "traversal"]
"""Algorithm 2 of arXiv 2402.12374, or traversal verification, arXiv 2505.12398."""

DistributionAt = Callable[[Tensor, Tensor], Tensor]
"""``(requests[A], nodes[A]) -> float32 [A, V]``, a fresh tensor: the caller writes in it."""


@dataclass(frozen=True)
class VerifyResult:
    """What verification decided, for B requests whose deepest tree has depth D.

    Attributes:
        accepted_nodes: int64 ``[B, D]``: the accepted path below the root, then -1.
        output_tokens: int64 ``[B, D + 1]``: the tokens of that path, the target's
            own token after it, then -1.
        num_accepted: int64 ``[B]``: length of the path, so a request emits
            ``num_accepted + 1`` tokens.
    """

    accepted_nodes: Tensor
    output_tokens: Tensor
    num_accepted: Tensor


def topology_of(parents: Tensor | Topology, tokens: Tensor) -> Topology:
    """The look-ups of these trees, on the device of ``tokens``.

    Raises:
        ValueError: If ``parents`` does not hold trees, or differs from ``tokens`` in shape.
    """
    if isinstance(parents, Topology):
        topology = parents.to(tokens.device)
    else:
        topology = Topology.from_parents(parents, tokens.device)
    if topology.children.shape[:2] != tokens.shape:
        raise ValueError(
            f"tokens are {list(tokens.shape)} but parents {list(topology.children.shape[:2])}"
        )
    return topology
