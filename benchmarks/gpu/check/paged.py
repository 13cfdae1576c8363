"""A paged KV cache of several layers, laid out as vLLM lays out its own."""

import torch
from torch import Tensor

BLOCK_SIZE = 16
_FP8_NAN = 0x7F  # of float8_e4m3fn


class PagedCache:
    """Keys and values of all layers, for requests of equally many positions.

    Attributes:
        layers: One ``[blocks, kv_heads, BLOCK_SIZE, 2 * head_size]`` each, key and value
            of a head one after the other.
        positions: Of each request, those of half-filled blocks included.
        block_table: int32 ``[R, ceil(positions / BLOCK_SIZE)]``: blocks in random order.

    Args:
        generator: Of block table and contents; its device is the cache's.
    """

    def __init__(
        self, num_layers: int, requests: int, positions: int, kv_heads: int, head_size: int,
        dtype: torch.dtype, generator: torch.Generator,
    ) -> None:  # fmt: skip
        device = generator.device
        self._head_size = head_size
        columns = -(-positions // BLOCK_SIZE)
        self.positions = columns * BLOCK_SIZE
        blocks = torch.randperm(requests * columns, generator=generator, device=device)
        self.block_table = blocks.view(requests, columns).to(torch.int32)
        shape = (len(blocks), kv_heads, BLOCK_SIZE, 2 * head_size)
        drawn = dtype if dtype.itemsize > 1 else torch.bfloat16
        self.layers = []
        for _ in range(num_layers):
            layer = torch.empty(shape, dtype=drawn, device=device)
            self.layers.append(layer.normal_(generator=generator).to(dtype))

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views ``[blocks, BLOCK_SIZE, kv_heads, head_size]`` of one layer."""
        keys, values = self.layers[layer].transpose(1, 2).split(self._head_size, dim=-1)
        return keys, values

    def poison(self, last: list[int]) -> None:
        """Makes all positions of each request from its ``last`` on NaN: nobody may read them."""
        end = self.block_table.shape[1] * BLOCK_SIZE
        for request, length in enumerate(last):
            positions = torch.arange(length, end, device=self.block_table.device)
            blocks = self.block_table[request, positions // BLOCK_SIZE].long()
            for number in range(len(self.layers)):
                for view in self.keys_and_values(number):
                    slots = positions % BLOCK_SIZE
                    if view.dtype.itemsize == 1:
                        view.view(torch.uint8)[blocks, slots] = _FP8_NAN
                    else:
                        view[blocks, slots] = float("nan")
