"""Tree attention: every node sees the committed context and its own ancestors.

A request with ``c`` committed tokens in the cache keeps node i's key and value
in slot ``c + i`` while the tree is scored. So one mask over the slots says it
all: slots below c are context, slot c + j belongs to node j.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor


def tree_attention_mask(
    context_lens: Tensor, ancestors: Tensor, num_keys: int, dtype: torch.dtype
) -> Tensor:
    """Additive attention mask for a batch of trees.

    Args:
        context_lens: int64 ``[B]``: committed tokens c of each request; node 0
            (the root) sits in slot c.
        ancestors: bool ``[Q, M]``: ``ancestors[q, j]`` says that query node q
            sees node j (itself or an ancestor).
        num_keys: Slots L that the keys cover, from slot 0 of each request.
        dtype: Floating dtype of the queries.

    Returns:
        ``[B, 1, Q, L]`` in ``dtype``: 0 where attended, -inf elsewhere.
    """
    slots = torch.arange(num_keys, device=context_lens.device)
    node_of_slot = slots[None, :] - context_lens[:, None]  # [B, L]
    is_context = node_of_slot < 0
    num_nodes = ancestors.shape[1]
    is_node = (node_of_slot >= 0) & (node_of_slot < num_nodes)
    seen = ancestors[:, node_of_slot.clamp(0, num_nodes - 1)]  # [Q, B, L]
    attended = is_context | (seen & is_node)
    mask = torch.zeros(attended.shape, dtype=dtype, device=context_lens.device)
    mask.masked_fill_(~attended, float("-inf"))
    return mask.transpose(0, 1).unsqueeze(1)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Masked attention of tree nodes over gathered keys and values.

    Args:
        query: ``[B, Q, num_heads, head_size]``.
        key, value: ``[B, num_kv_heads, L, head_size]``; head h of the query
            uses key head ``h // (num_heads // num_kv_heads)``.
        mask: ``[B, 1, Q, L]``, from `tree_attention_mask`.
        scale: Softmax scale.

    Returns:
        ``[B, Q, num_heads, head_size]`` in the query's dtype.
    """
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key,
        value,
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[1],
    )
    return output.transpose(1, 2)
