"""Tree attention: every node sees the committed context and its own ancestors.

A request with ``c`` committed tokens in the cache keeps node i's key and value in slot ``c + i``
while the tree is scored. So one mask over the slots is enough: slots below c are context, slot c +
j belongs to node j.

Where a layer has a sliding window, it counts positions: node i's is ``c + depth(i)``.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor


def within_window(ancestors: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Depths of query nodes, and the nodes that each still sees within a window.

    Args:
        ancestors: bool ``[..., Q, M]``: ``ancestors[q, j]`` says that node j is query q itself or
            one of its ancestors. Parents come before their children. Or ``[..., Q, Q]``, all of
            it: a block whose nodes see one another, each a position after the one before it.
        window: Tokens that a query sees, itself included; of a block as many to both sides.

    Returns:
        ``(depths, seen)``: int64 ``[..., Q]``, 0 for a root; bool ``[..., Q, M]``.
    """
    # In the order of nodes a query's ancestors lie in the order of their depths.
    depth_of_ancestor = ancestors.long().cumsum(dim=-1) - 1
    is_whole = ancestors.shape[-2] == ancestors.shape[-1]
    own = depth_of_ancestor.diagonal(dim1=-2, dim2=-1) if is_whole else depth_of_ancestor[..., -1]
    depths = own.contiguous()
    return depths, ancestors & ((depth_of_ancestor - depths[..., None]).abs() < window)


def tree_attention_mask(
    context_lens: Tensor,
    ancestors: Tensor,
    num_keys: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """Additive attention mask for a batch of trees.

    Args:
        context_lens: int64 ``[B]``: committed tokens c of each request; the root is in slot c.
        ancestors: bool ``[Q, M]``: ``ancestors[q, j]`` says that query node q sees node j (itself
            or an ancestor); or ``[B, Q, M]``, of each request.
        num_keys: Slots L that the keys cover, from slot 0 of each request.
        dtype: Floating dtype of the queries.
        window: Tokens that a query sees, itself included; None: all before it.

    Returns:
        ``[B, 1, Q, L]`` in ``dtype``: 0 where attended, -inf elsewhere.
    """
    slots = torch.arange(num_keys, device=context_lens.device)
    node_of_slot = (slots - context_lens[:, None])[:, None]  # [B, 1, L]
    ancestors = ancestors.expand(len(context_lens), *ancestors.shape[-2:])
    is_context = node_of_slot < 0
    if window is not None:
        depths, ancestors = within_window(ancestors, window)
        first = context_lens[:, None] + depths - window + 1  # [B, Q]
        is_context = is_context & (slots >= first[..., None])  # [B, Q, L]
    queries, num_nodes = ancestors.shape[1:]
    is_node = (node_of_slot >= 0) & (node_of_slot < num_nodes)
    places = node_of_slot.clamp(0, num_nodes - 1).expand(-1, queries, -1)
    attended = is_context | (ancestors.gather(2, places) & is_node)
    mask = torch.zeros(attended.shape, dtype=dtype, device=context_lens.device)
    return mask.masked_fill_(~attended, float("-inf"))[:, None]


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Masked attention of tree nodes over gathered keys and values.

    Args:
        query: ``[B, Q, num_heads, head_size]``.
        key, value: ``[B, num_kv_heads, L, head_size]``; head h of the query
            uses key head ``h // (num_heads // num_kv_heads)``.
        mask: ``[B, 1, Q, L]``, from `tree_attention_mask`.
        soft_cap: Scores s become ``soft_cap * tanh(s / soft_cap)``; 0: they stay.
        sinks: float32 ``[num_heads]``: a score of each head that takes its share of the
            softmax and adds nothing to the output.

    Returns:
        ``[B, Q, num_heads, head_size]`` in the query's dtype. NaN and infinity reach the rows that
        see them, and no others.
    """
    queries, group = query.transpose(1, 2), query.shape[2] // key.shape[1]
    is_spoilt = ~value.isfinite().all(dim=-1)  # [B, num_kv_heads, L]
    all_finite = not is_spoilt.any() and bool(key.isfinite().all())
    if not soft_cap and sinks is None and all_finite:
        output = F.scaled_dot_product_attention(
            queries, key, value, attn_mask=mask, scale=scale, enable_gqa=group != 1
        )
        return output.transpose(1, 2)
    # Step by step in float32: torch's own function lacks soft caps and sinks. It also adds masks,
    # which leave NaN what it is.
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (key, value))
    scores = queries.float() @ keys.transpose(2, 3) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    is_seen = mask == 0
    scores = torch.where(is_seen, scores, -torch.inf)
    if sinks is not None:
        own = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    is_spoilt = is_spoilt.repeat_interleave(group, dim=1)[:, :, None]
    attended = weights @ values.masked_fill(is_spoilt.transpose(2, 3), 0)
    sees_spoilt = (is_seen & is_spoilt).any(dim=-1, keepdim=True)
    return attended.masked_fill_(sees_spoilt, torch.nan).transpose(1, 2).to(query.dtype)
