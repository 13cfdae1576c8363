"""Verification of trees in which tokens that the target cannot give were replaced before scoring.

A grammar that forbids a drafted token x makes its probability 0, so x would be rejected. Another
token y may be scored in its place, if the decision about x stays the same. Here x is rejected like
any child (R and D lose it), and nothing below it is looked at. The walk ends at some node with a
token t of the right law. If t is the y of one of the node's replaced children, the walk goes on
there. The subtree below was drawn from a known Q, and is verified as a tree of its own, whose root
is y. Scoring y there changes no probability.

Where the target's token is given, none of this is needed: `match_tree` and `match_nodes` take any
different children.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sequoia_vllm.verification.topology import (
    PADDING,
    ROOT,
    DistributionAt,
    Topology,
    VerifyResult,
    topology_of,
)
from sequoia_vllm.verification.walk import true_indices


def verify_replaced(
    verify: Callable[..., VerifyResult],
    target_at: DistributionAt,
    draft_at: DistributionAt,
    drawn: Tensor,
    scored: Tensor,
    parents: Tensor | Topology,
    generator: torch.Generator | None = None,
) -> VerifyResult:
    """Verifies trees whose scored tokens are not all the drawn ones.

    The emitted tokens have the law of `verify`, whatever tokens are chosen, under three
    conditions. A chosen token differs from its siblings' tokens, drawn and scored. Its choice
    does not depend on what was drawn below its node. P at its parent is 0 for the drawn token.

    Args:
        verify: The host function of a method (`methods`).
        target_at, draft_at, parents, generator: See `walk_tree`. P is after the path of scored
            tokens. How much is taken from the generator does not depend on what is decided: ranks
            that share a seed stay in step.
        drawn, scored: int64 ``[B, N+1]``: tokens as they were drawn, and as the target scored them.
            Where they differ a node was replaced.

    Raises:
        ValueError: See `walk_tree`.
    """
    topology = topology_of(parents, scored)
    replaced = drawn != scored
    seed = torch.randint(2**62, (1,), generator=generator, device=scored.device)
    later = torch.Generator(scored.device).manual_seed(int(seed))
    requests = torch.arange(len(scored), device=scored.device)
    roots = torch.zeros_like(requests)
    found = VerifyResult(
        accepted_nodes=scored.new_full((len(scored), topology.max_depth), -1),
        output_tokens=scored.new_full((len(scored), topology.max_depth + 1), -1),
        num_accepted=scored.new_zeros(len(scored)),
    )
    while requests.numel():
        nodes, below = _subtrees(
            roots, topology.parents[requests], replaced[requests], topology.max_depth
        )
        result = verify(
            _by_column(target_at, requests, nodes),
            _by_column(draft_at, requests, nodes),
            drawn[requests].gather(1, nodes),
            below,
            generator,
        )
        ends, last_tokens = _extend(found, requests, nodes, result)
        children = topology.children[requests, ends]
        own = requests[:, None]
        follows = (children >= 0) & replaced[own, children]
        follows &= scored[own, children] == last_tokens[:, None]
        going = true_indices(follows.any(dim=1))
        ranks = follows[going].int().argmax(dim=1)
        requests, roots = requests[going], children[going, ranks]
        found.accepted_nodes[requests, found.num_accepted[requests]] = roots
        found.num_accepted[requests] += 1
        generator = later
    return found


def _subtrees(
    roots: Tensor, parents: Tensor, replaced: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """The parts of A trees that are verified at once: from a root down to replaced nodes.

    ``parents`` and ``replaced`` are of the whole trees, ``[A, N+1]``, at most ``depth`` edges deep.

    Returns:
        int64 ``[A, M]`` each: the columns' nodes in the whole tree (in padding any), and parents
        as of `walk_tree`, in columns.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    is_root = nodes == roots[:, None]
    above, opens = parents.clamp(min=0), is_root | ~replaced
    inside = is_root
    for _ in range(depth):  # a level further down
        inside = is_root | ((inside & opens).gather(1, above) & (parents >= 0))
    columns = inside.cumsum(dim=1) - 1
    own_parents = columns.gather(1, above).masked_fill(is_root, ROOT)
    width = int(inside.sum(dim=1).max())
    # Stable: what belongs to the subtree keeps its order.
    order = (~inside).byte().argsort(dim=1, stable=True)[:, :width]
    there = inside.gather(1, order)
    return order, own_parents.gather(1, order).masked_fill(~there, PADDING)


def _by_column(distribution_at: DistributionAt, requests: Tensor, nodes: Tensor) -> DistributionAt:
    """The distributions at the columns' nodes; row i is the tree of ``requests[i]``."""
    return lambda rows, columns: distribution_at(requests[rows], nodes[rows, columns])


def _extend(
    paths: VerifyResult, requests: Tensor, nodes: Tensor, result: VerifyResult
) -> tuple[Tensor, Tensor]:
    """Appends what was found in the subtrees of A requests, whose roots were accepted before.

    ``result`` is in columns, whose nodes in the whole trees are ``nodes``, int64 ``[A, M]``.

    Returns:
        int64 ``[A]`` each: the nodes at which paths end now, and the tokens after them.
    """
    rows = torch.arange(len(requests), device=requests.device)
    before, count = paths.num_accepted[requests], result.num_accepted
    for step in range(result.accepted_nodes.shape[1]):
        there = true_indices(count > step)
        at = requests[there], before[there] + step
        paths.accepted_nodes[at] = nodes[there, result.accepted_nodes[there, step]]
        paths.output_tokens[at] = result.output_tokens[there, step]
    last_tokens = result.output_tokens[rows, count]
    paths.output_tokens[requests, before + count] = last_tokens
    paths.num_accepted[requests] = before + count
    columns = torch.cat([torch.zeros_like(rows)[:, None], result.accepted_nodes], dim=1)
    return nodes[rows, columns[rows, count]], last_tokens
