"""Tree attention over a paged KV cache, and the commit of accepted paths, request by request.

Caches are given as vLLM's attention backends see them: views of keys and of values
``[blocks, block_size, Hkv, D]``, whatever their order in memory. Request r's position p
lies in block ``block_table[r, p // block_size]`` at ``p % block_size``: committed tokens at
0, 1, ..., c - 1, and node i of its tree at ``c + i``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Sequence[int],
    query_start_loc: Sequence[int],
    ancestors: Tensor,
    first_node: int,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    elsewhere: float = float("nan"),
    window: int | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attention of nodes to their request's committed tokens, their ancestors and themselves.

    Args:
        query: ``[T, Hq, D]``: rows of all requests, in node order.
        key_cache, value_cache: ``[blocks, block_size, Hkv, D]``; values may have another size.
        block_table: int ``[R, columns]``.
        query_start_loc: R + 1 numbers: the rows of request r end where those of r + 1 begin.
        ancestors: bool ``[N, N]``: whether the row's node sees the column's; or ``[R, N, N]``, of
            each request's own tree.
        first_node: Node of each request's first row.
        key_scale, value_scale: What stored keys and values are multiplied by.
        elsewhere: What rows hold that are no request's.
        window: Positions that a node sees, its own included; a node's is its depth after the
            context. Of a block, whose nodes see one another, each lies a position after the one
            before it, and sees as many to both sides. None: all.
        soft_cap, sinks: As `dense_attention` has them.
        chunk: Positions are in chunks of so many, and a node sees those in its own. None: all.

    Returns:
        float32 ``[T, Hq, D]``, of the values' size, computed in float64.
    """
    shape = *query.shape[:2], value_cache.shape[3]
    output = torch.full(shape, elsewhere, dtype=torch.float32, device=query.device)
    for request, context in enumerate(context_lens):
        first, last = query_start_loc[request], query_start_loc[request + 1]
        if first == last:
            continue
        nodes = range(first_node, first_node + last - first)
        keys, values = (
            gathered(cache, block_table[request], context + nodes.stop).double()
            for cache in (key_cache, value_cache)
        )
        sees = ancestors[request] if ancestors.ndim == 3 else ancestors
        hidden = ~sees[nodes.start : nodes.stop, : nodes.stop]
        hidden = torch.cat([hidden.new_zeros(len(nodes), context), hidden], dim=1)
        depths = sees[: nodes.stop].tril().sum(dim=1) - 1
        positions = torch.cat([torch.arange(context).to(depths), context + depths])
        own = positions[context + nodes.start :, None]
        if window is not None:
            hidden |= (own - positions).abs() >= window
        if chunk is not None:
            hidden |= own // chunk != positions // chunk
        output[first:last], _ = dense_attention(
            query[first:last], keys * key_scale, values * value_scale, scale, hidden, soft_cap,
            sinks,
        )  # fmt: skip
    return output


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    hidden: Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one request, computed in the dtype of its keys.

    Args:
        query: ``[Q, Hq, D]``; head h attends to key head ``h // (Hq // Hkv)``.
        keys, values: float32 or float64 ``[K, Hkv, D]``.
        scale: Softmax scale.
        hidden: bool ``[Q, K]``: keys that a row does not see; None: it sees all.
        soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; 0: they stay.
        sinks: ``[Hq]``: a score of each head besides those of its keys, for a value of 0.

    Returns:
        Outputs ``[Q, Hq, D]``, 0 in rows that see no key, and natural log-sum-exps
        ``[Hq, Q]``, sinks included.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.to(keys.dtype), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if hidden is None:
        hidden = scores.new_zeros(scores.shape[1:], dtype=torch.bool)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        own = sinks.to(scores)[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat([scores, own], dim=2)
    weights = scores.softmax(dim=2)[..., : len(keys)].masked_fill(hidden.all(dim=1)[:, None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights, values), scores.logsumexp(dim=2)


def gathered(cache: Tensor, block_table: Tensor, positions: int) -> Tensor:
    """What a cache holds of one request.

    Args:
        cache: Keys or values ``[blocks, block_size, Hkv, D]``.
        block_table: int ``[columns]``, the request's.
        positions: How many, from its first.

    Returns:
        float32 ``[positions, Hkv, D]``.
    """
    place = torch.arange(positions, device=block_table.device)
    blocks = block_table[place // cache.shape[1]].long()
    # Not every torch can index fp8.
    stored = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return stored[blocks, place % cache.shape[1]].view(cache.dtype).float()


def commit_reference(
    caches: Sequence[Tensor], block_table: Tensor, context_lens: Sequence[int], accepted: Tensor
) -> None:
    """Moves the accepted path's keys and values to the positions after the root, in place.

    Every source is read before anything is written.

    Args:
        caches: Each ``[blocks, Hkv, block_size, width]``: of keys, of values or of both.
        block_table: int ``[R, columns]``.
        context_lens: Position of each request's root.
        accepted: int ``[R, depth]``: accepted nodes below the root, -1 padded.
    """
    size = caches[0].shape[2]
    before = [cache.clone() for cache in caches]
    for request, context in enumerate(context_lens):
        for step, node in enumerate(accepted[request].tolist()):
            if node < 0:
                break
            (source, from_slot), (target, to_slot) = (
                (int(block_table[request, position // size]), position % size)
                for position in (context + node, context + 1 + step)
            )
            for cache, old in zip(caches, before, strict=True):
                cache[target, :, to_slot] = old[source, :, from_slot]


def random_ancestors(nodes: int, generator: torch.Generator) -> Tensor:
    """bool ``[nodes, nodes]`` of a random tree: whether the row's node sees the column's.

    A parent is at most 20 nodes before its child. Generator and result are on the CPU.
    """
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(max(0, node - 20), node, (), generator=generator))
        seen[node] |= seen[parent]
    return seen
