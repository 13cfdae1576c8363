"""What is warmed up meets every tile that a tree near the longest request may have."""

import pytest
import torch

pytest.importorskip("triton")

from sequoia_vllm.engine.v2.warming_up import warmed_sizes
from sequoia_vllm.kernels.attention_tiles import choose_tile


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tile_is_warmed_up(group, dtype):
    for head_size in (64, 128, 256):
        for capability in (80, 89, 90, 120):
            for size in (2, 3, 5, 16, 48, 64):
                tiles = {
                    nodes: choose_tile(nodes * group, head_size, dtype.itemsize, capability)
                    for nodes in range(2, size + 1)
                }
                warmed = warmed_sizes(size, dtype)
                assert {tiles[nodes] for nodes in warmed} == set(tiles.values())
                assert warmed[0] == size == max(warmed)
