"""Verification of token trees against the target (Algorithm 2 of arXiv 2402.12374).

The names in the code against the paper's: ``residual`` is R, which starts as
the target's distribution P; ``draft`` is D, which starts as the draft's Q;
``token`` is the child's x̂.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sequoia_vllm.verification.topology import DistributionAt, Topology, VerifyResult, topology_of

TokenAt = Callable[[Tensor, Tensor, int], Tensor]
"""``(requests[A], nodes[A], depth) -> int64 [A]``: the target's token after each node."""

Choice = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""``(requests[A], nodes[A], depth) ->`` for each the accepted child (-1: the walk ends) and the
emitted token, and the positions of those that accepted a child."""


def walk_tree(
    target_at: DistributionAt,
    draft_at: DistributionAt,
    tokens: Tensor,
    parents: Tensor | Topology,
    generator: torch.Generator | None = None,
) -> VerifyResult:
    """Algorithm 2, asking for the distributions of the visited nodes only.

    The emitted tokens have the law of sampling the target one token at a time. For that the
    children of a node must be distinct, and drawn as `draw_without_replacement` does. For a
    one-hot P any children will do.

    Each request uses one uniform number per node, in float64, whatever the outcome. The first
    picks the token that ends the walk; the i-th after it (from 1) decides node i.

    Args:
        target_at: P at ``nodes[j]`` of ``requests[j]``, float32 ``[A, V]``. Called once per depth,
            for every request still walking. Must return a fresh tensor: it is overwritten.
        draft_at: Q in the same form; called for those whose node has children.
        tokens: int64 ``[B, N+1]``; the root's is not read. In padding anything in the vocabulary.
        parents: int ``[B, N+1]`` (-1 the root, -2 padding), or the `Topology` made from it.
        generator: See `node_uniforms`.

    Raises:
        ValueError: ``parents`` does not hold trees, or differs from ``tokens`` in shape.
    """
    topology = topology_of(parents, tokens)
    uniforms = node_uniforms(tokens, generator)

    def choose(requests: Tensor, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        residual = target_at(requests, nodes)
        children = topology.children[requests, nodes, : topology.branches[depth]]
        accepted = torch.full_like(requests, -1)
        inner = true_indices((children >= 0).any(dim=1))
        if inner.numel():
            draft, places = draft_at(requests[inner], nodes[inner]), children[inner]
            siblings = places, *(of[requests[inner, None], places] for of in (tokens, uniforms))
            accepted[inner] = _accept_child(residual, draft, inner, *siblings)
        moving, stopped = _partition(accepted >= 0)
        emitted = tokens[requests, accepted]  # has no meaning for those that stopped
        if stopped.numel():
            emitted[stopped] = sample_rows(residual[stopped], uniforms[requests[stopped], 0])
        return accepted, emitted, moving

    return _walk(choose, topology, tokens)


def match_tree(
    target_token_at: TokenAt, tokens: Tensor, parents: Tensor | Topology
) -> VerifyResult:
    """Verifies against a target whose next token is a function of the node.

    The target's token is emitted, and the walk goes on where a child carries it
    (the first, should two).

    Args:
        target_token_at: The target's token after ``nodes[j]`` of ``requests[j]``,
            int64 ``[A]``; called once per depth, for the requests still walking.
        tokens, parents: See `walk_tree`.

    Raises:
        ValueError: See `walk_tree`.
    """
    topology = topology_of(parents, tokens)

    def choose(requests: Tensor, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        target = target_token_at(requests, nodes, depth)
        children = topology.children[requests, nodes]
        matches = (children >= 0) & (tokens[requests[:, None], children] == target[:, None])
        # argmax of 0 and 1: the first match, or rank 0 where there is none.
        first = children.gather(1, matches.int().argmax(dim=1, keepdim=True)).squeeze(1)
        matched = matches.any(dim=1)
        return torch.where(matched, first, -1), target, true_indices(matched)

    return _walk(choose, topology, tokens)


def match_nodes(target_tokens: Tensor, tokens: Tensor, parents: Tensor | Topology) -> VerifyResult:
    """`match_tree` where the target's token is known at every node: no walk, no waiting.

    A node is accepted if it and all its ancestors carry the target's token
    after their parents. Siblings must carry different tokens.

    Args:
        target_tokens: int64 ``[B, N+1]``: the target's token after each node.
        tokens, parents: See `walk_tree`.

    Raises:
        ValueError: See `walk_tree`.
    """
    topology = topology_of(parents, tokens)
    accepted = tokens == target_tokens.gather(1, topology.ancestors_up[0])
    accepted &= topology.parents >= 0
    accepted[:, 0] = True
    depth = topology.max_depth
    for above in topology.ancestors_up:
        accepted &= accepted.gather(1, above)
    nodes = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # One column per depth, and one more for the nodes that are not on the path.
    column = torch.where(accepted, topology.depths, depth + 1)
    path = tokens.new_full((tokens.shape[0], depth + 2), -1).scatter_(1, column, nodes)[:, :-1]
    emitted = torch.where(path >= 0, target_tokens.gather(1, path.clamp(min=0)), -1)
    return VerifyResult(path[:, 1:], emitted, accepted.sum(dim=1) - 1)


def _walk(choose: Choice, topology: Topology, tokens: Tensor) -> VerifyResult:
    """Walks from each root downwards, all requests one level at a time, as `Choice` says."""
    batch, depths = tokens.shape[0], topology.max_depth + 1
    accepted_nodes = tokens.new_full((batch, depths), -1)
    output_tokens = tokens.new_full((batch, depths), -1)
    requests = torch.arange(batch, device=tokens.device)
    nodes = torch.zeros_like(requests)
    for depth in range(depths):
        if not requests.numel():
            break
        accepted, emitted, moving = choose(requests, nodes, depth)
        accepted_nodes[requests, depth] = accepted
        output_tokens[requests, depth] = emitted
        requests, nodes = requests[moving], accepted[moving]
    # Nothing is accepted below the deepest node: the last column is all -1.
    return VerifyResult(accepted_nodes[:, :-1], output_tokens, (accepted_nodes >= 0).sum(dim=1))


def _accept_child(
    residual: Tensor, draft: Tensor, rows: Tensor, nodes: Tensor, tokens: Tensor, uniforms: Tensor
) -> Tensor:
    """Algorithm 2's inner loop: tries the children of each of A nodes in turn.

    Args:
        residual: R, float32 ``[W, V]``. Row ``rows[j]`` belongs to node j; where
            no child is accepted it becomes what the next token is drawn from.
        draft: D, float32 ``[A, V]``; overwritten.
        rows: int64 ``[A]``, increasing.
        nodes, tokens, uniforms: ``[A, b]``: children in draft order; no child: node -1.

    Returns:
        int64 ``[A]``: the accepted child of each node, or -1.
    """
    accepted = torch.full_like(rows, -1)
    # Positions in `rows`. `target` and `draft` keep the rows of the undecided
    # only, so that one request's rejections cost the others nothing.
    undecided = torch.arange(rows.numel(), device=rows.device)
    target = take_rows(residual, rows)
    for rank in range(branches := nodes.shape[1]):
        child, token = nodes[undecided, rank], tokens[undecided, rank]
        target_at_token = probability_of(target, token)
        draft_at_token = probability_of(draft, token)
        waiting = (child >= 0) & (accepted[undecided] < 0)
        # u < R[x] / D[x], without dividing by zero. A u below 1 in float64 times a float32 D[x]
        # stays below D[x], so R[x] = D[x] > 0 always accepts.
        accept = waiting & (uniforms[undecided, rank] * draft_at_token < target_at_token)
        accepted[undecided] = torch.where(accept, child, accepted[undecided])

        rejecting = true_indices(waiting & ~accept)
        if not rejecting.numel():
            break
        undecided, child, token = undecided[rejecting], child[rejecting], token[rejecting]
        target, draft = take_rows(target, rejecting), take_rows(draft, rejecting)

        target, vanished = _subtract(target, draft)
        residual[rows[undecided]] = target
        # R and D differ by rounding alone: the acceptance probability was 1.
        certain = vanished & (target_at_token[rejecting] > 0)
        accepted[undecided] = torch.where(certain, child, accepted[undecided])

        if rank + 1 < branches:
            draft = without_token(draft, token, tokens[undecided, : rank + 1])
    return accepted


def _subtract(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """norm(max(R - D, 0)), or R itself where nothing is left; and the rows in which that is so."""
    left = (target - draft).clamp_(min=0)
    mass = left.sum(dim=1, keepdim=True)
    vanished = mass == 0
    return torch.where(vanished, target, left.div_(mass)), vanished.squeeze(1)


def node_uniforms(tokens: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random numbers by which verifiers decide: float64 in [0, 1), one per node of ``tokens``.

    Args:
        tokens: ``[B, N+1]``.
        generator: One stream for all requests, on their device; None: torch's default one.
    """
    uniforms = torch.empty(tokens.shape, dtype=torch.float64, device=tokens.device)
    return uniforms.uniform_(generator=generator)


def _partition(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Indices where ``mask`` is true, and where it is false; waits for the device only once."""
    order = mask.byte().argsort(descending=True, stable=True)  # not every device sorts bool
    split = int(mask.sum())
    return order[:split], order[split:]


# -- batches of distributions, each ``[A, V]`` ---------------------------------------


def without_token(draft: Tensor, token: Tensor, rejected: Tensor) -> Tensor:
    """D without a token: D[x] = 0, D = norm(D); in place.

    Args:
        draft: D, ``[A, V]``; overwritten.
        token: int64 ``[A]``: the child that was rejected last.
        rejected: int64 ``[A, rank + 1]``: all children so far, this one included. Where D
            has nothing left, it becomes uniform over the other tokens.
    """
    draft.scatter_(1, token[:, None], 0.0)
    mass = draft.sum(dim=1, keepdim=True)
    exhausted = mass == 0
    uniform = exhausted.to(draft.dtype) / max(draft.shape[1] - rejected.shape[1], 1)
    # One pass for both cases: D / mass + 0, or 0 / 1 + uniform.
    torch.addcdiv(uniform, draft, mass + exhausted, out=draft)
    return draft.scatter_(1, rejected, 0.0)


def sample_rows(distribution: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of ``[A, V]`` by inversion, with ``uniform`` ``[A]`` in [0, 1).

    Rows of NaN give token 0, as in vLLM's sampler.
    """
    # float64: in float32 the sums of a large vocabulary lose its rare tokens.
    cumulative = distribution.cumsum(dim=1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    index.masked_fill_(threshold.isnan().squeeze(1), 0)
    return index.clamp_(max=distribution.shape[1] - 1)


def probability_of(distribution: Tensor, token: Tensor) -> Tensor:
    """``[A]``: the probability of one token per row."""
    return distribution.gather(1, token[:, None]).squeeze(1)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """``values[rows]`` for increasing rows; no copy where that is all of them."""
    return values if rows.numel() == values.shape[0] else values.index_select(0, rows)


def true_indices(mask: Tensor) -> Tensor:
    """Indices at which a mask ``[A]`` is True; waits for the device."""
    return mask.nonzero().squeeze(1)
