"""Caches of the CPU's attention, filled by token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sequoia_vllm.attention.cpu_kernel import keys_and_values, packed_keys_and_values


def stored(parts: Sequence[Tensor], shape: Sequence[int], packed: bool) -> Tensor:
    """One layer's cache of this shape.

    Args:
        parts: Keys and values ``[blocks, heads, block_size, head_size]``.
        packed: Whether it has the layout that CPUs with AMX have.
    """
    cache = torch.empty(shape, dtype=parts[0].dtype)
    by_token = packed_keys_and_values if packed else keys_and_values
    for part, given in zip(by_token(cache), parts, strict=True):
        part.copy_(given.reshape(part.shape))
    return cache


def loaded(cache: Tensor, packed: bool) -> list[Tensor]:
    """Keys and values ``[blocks, heads, block_size, head_size]`` of such a cache, as copies."""
    *shape, width = cache.shape
    by_token = packed_keys_and_values if packed else keys_and_values
    return [part.reshape(*shape, width // 2).clone() for part in by_token(cache)]
