"""Weights that vLLM offloads to the host's memory, as streamed weights.

It has two backends, which differ in what a wide tree costs:

- *prefetch* copies layers into buffers on the device while others compute. With two buffers or
  more a pass takes the longer of copying and computing; with one, copying waits for computing
  and the pass takes both. The bytes do not depend on the tree.
- *UVA* has the matrix products themselves read the weights through the link. A product works
  on tiles of rows, and reads each weight once for each tile: the bytes of a pass grow with
  ceil(rows / rows of a tile), so that 768 nodes cost six times what one does. The rest of the
  pass is taken not to overlap with it.

Both stream layers only: embeddings and the output matrix stay where they are. The draft is taken
to be resident, since it runs many times in a step.
"""

import math
from typing import Literal

from sequoia_vllm.hardware.device import identify, known_devices
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.streaming import LINKS, LinkName, StreamedWeights

OffloadBackend = Literal["prefetch", "uva"]

# cuBLAS and CUTLASS have tiles of 64 to 256 rows; 128 is the usual one where rows are many.
# Assumed: nobody measured which of them vLLM's products take through UVA.
UVA_TILE_ROWS = 128
# Buffers that are needed to copy one layer while another computes.
OVERLAPPING_BUFFERS = 2
# Taken for a device whose link is not known. The faster link leads to the smaller trees.
_CAUTIOUS_LINK: LinkName = "pcie5"


def streamed_layers(
    target: ModelShape,
    size: float,
    bytes_per_second: float,
    source: str,
    *,
    value_bytes: float = 2.0,
    devices: int = 1,
    backend: OffloadBackend = "prefetch",
    buffers: int = OVERLAPPING_BUFFERS,
) -> StreamedWeights:
    """A number of bytes of a target's layers, offloaded as vLLM does.

    Args:
        size: Bytes on each device, as vLLM counts; more than the layers have: all of them.
        source: Where from, in words ("PCIe 4.0 x16").
        buffers: Layers that prefetching has buffers for (``--offload-prefetch-step``).

    Raises:
        ValueError: The size or the rate is not above 0 and finite.
    """
    for what, value in (("size", size), ("rate", bytes_per_second)):
        if not 0 < value < math.inf:
            raise ValueError(f"weights offloaded: {what} {value:g} must be above 0")
    layers = target.layers_bytes(value_bytes) / devices
    prefetches = backend == "prefetch"
    return StreamedWeights(
        bytes_per_pass=min(size, layers),
        bytes_per_second=bytes_per_second,
        source=f"{source}, {backend}" + (f", {buffers} buffers" if prefetches else ""),
        overlaps=prefetches and buffers >= OVERLAPPING_BUFFERS,
        tile_rows=None if prefetches else UVA_TILE_ROWS,
        buffer_bytes=buffers * layers / target.layers if prefetches else 0.0,
    )


def host_link(device: str) -> tuple[LinkName, str]:
    """The link between a device (its id, or the driver's name for it) and the host's memory.

    Returns:
        The link's name, and a description that says if the link is a guess.
    """
    known = known_devices().get(identify(device).id or "")
    name = known.host_link if known else None
    if name is not None:
        return name, LINKS[name].name
    return _CAUTIOUS_LINK, f"{LINKS[_CAUTIOUS_LINK].name} (assumed)"
