"""Caches, block tables and accepted paths to commit."""

import torch
from torch import Tensor


def random_cache(
    blocks: int, heads: int, slots: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    shape = (blocks, heads, slots, width * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)


def bits(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.uint8)


def tables(requests: int, max_blocks: int, blocks: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(blocks, generator=generator)[: requests * max_blocks]
    return order.view(requests, max_blocks).int()


# Overlaps: 2 then 4 write where 1.. and 3.. read; a path that starts in its place;
# an empty one; one that crosses block boundaries; a full chain.
PATHS = torch.tensor(
    [
        [2, 3, 4, 5, 6],
        [1, 2, 5, 6, 9],
        [-1, -1, -1, -1, -1],
        [3, 9, 17, 18, -1],
        [1, 2, 3, 4, 5],
        [20, -1, -1, -1, -1],
    ],
    dtype=torch.int32,
)
CONTEXTS = torch.tensor([0, 15, 3, 30, 31, 16], dtype=torch.int32)
