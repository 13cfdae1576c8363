"""How fast a disk gives weights, as an engine reads them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from sequoia_vllm.offload.layer_ring import LayerRing
from sequoia_vllm.offload.weight_file import CHUNK, WeightFile

_REGIONS = 8  # of a read by each thread and the next: 128 MiB


def read_rate(directory: Path) -> float:
    """Bytes per second of a file that is written and read once, in a part of a second.

    Raises:
        OffloadError: The directory cannot be used.
    """
    file = WeightFile(directory)
    # Disks may know zeros, and patterns.
    noise = torch.frombuffer(bytearray(os.urandom(2 * CHUNK)), dtype=torch.uint8)
    regions = []
    for _ in range(_REGIONS):
        region, mapped = file.region(len(noise))
        mapped.copy_(noise)
        file.seal(region, mapped)
        regions.append(region)
    ring = LayerRing(file, regions)
    started = time.perf_counter()
    ring.start()
    for layer in range(_REGIONS):
        ring.wait(layer)
        ring.release(layer)
    seconds = time.perf_counter() - started
    ring.close()
    size = file.size
    file.close()
    return size / seconds
