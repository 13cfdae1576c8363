"""Targets whose weights do not fit: read from outside the device's memory in every pass.

The paper's largest trees are for such targets (768 nodes for a 70B target on one L40). Any source
with a number of bytes and a rate can be described; docs/predictions.md describes vLLM's two. The
draft is taken to be resident, since it runs many times in a step.
"""

import math
from typing import Literal

from pydantic import Field

from sequoia_vllm.hardware.device import LINKS, Link, LinkName, identify, known_devices
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.json_file import FileModel

OffloadBackend = Literal["prefetch", "uva"]

# cuBLAS and CUTLASS have tiles of 64 to 256 rows; 128 is the usual one where rows are many.
# Assumed: nobody measured which of them vLLM's products take through UVA.
UVA_TILE_ROWS = 128
# Buffers that are needed to copy one layer while another computes.
OVERLAPPING_BUFFERS = 2
# Taken for a device whose link is not known. The faster link leads to the smaller trees.
_CAUTIOUS_LINK: LinkName = "pcie5"


class StreamedWeights(FileModel):
    """Weights of the target that every pass reads from outside the device's memory."""

    bytes_per_pass: float = Field(gt=0)
    """Bytes of these weights, on each device of a tensor-parallel group."""
    bytes_per_second: float = Field(gt=0, description="Achieved, of each device.")
    source: str = Field(min_length=1, description="Where they lie and how they come, in words.")
    overlaps: bool  # reading goes on while the device computes: a pass takes the longer of both
    tile_rows: int | None = Field(default=None, ge=1)
    """Rows of a tile of the matrix products, where these read the weights themselves, once for each
    tile; none: weights are copied once for all rows."""
    buffer_bytes: float = Field(default=0.0, ge=0)  # memory that they pass through, on each device

    def pass_seconds(self, rows: float, computing: float) -> float:
        """Seconds of a pass over so many rows (tokens of all requests).
        Without reading it takes ``computing`` seconds."""
        reads = 1 if self.tile_rows is None else math.ceil(rows / self.tile_rows)
        reading = reads * self.bytes_per_pass / self.bytes_per_second
        return max(reading, computing) if self.overlaps else reading + computing


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


def host_link(device: str) -> Link:
    """The link between a device (its id, or the driver's name) and the host's memory.
    The name of a link that is a guess says so."""
    known = known_devices().get(identify(device).id or "")
    if known is not None and known.host_link is not None:
        return LINKS[known.host_link]
    assumed = LINKS[_CAUTIOUS_LINK]
    return assumed._replace(name=f"{assumed.name} (assumed)")
