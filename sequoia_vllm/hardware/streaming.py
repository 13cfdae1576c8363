"""Targets whose weights do not fit: read from outside the device's memory in every pass.

A pass then takes as long as moving the weights: tens of times as long as from the device's own
memory, and hardly longer for hundreds of tokens than for one. The paper's largest trees are for
such targets (768 nodes for a 70B target on one L40).

Any source with a number of bytes and a rate can be described: the host's memory over a link, or a
disk. How vLLM offloads is in `sequoia_vllm.hardware.offloading`.
"""

import math
from typing import Literal, NamedTuple

from pydantic import Field

from sequoia_vllm.json_file import FileModel

LinkName = Literal["pcie3", "pcie4", "pcie5", "nvlink-c2c"]


class Link(NamedTuple):
    """A way from the host's memory to a device's."""

    name: str
    bytes_per_second: float  # measured rate of copies from pinned memory


LINKS: dict[LinkName, Link] = {
    # 8 GT/s, 16 lanes, 128b/130b. An author of BaM (ZaidQureshi/bam#54): 12 GB/s on a V100.
    "pcie3": Link("PCIe 3.0 x16", 12.0e9),
    # nvbandwidth's host_to_device_memcpy_ce: 24.8 GB/s on eight A100 SXM4 (NVIDIA's developer
    # forum, 352186), 23.9 to 26.4 on eight RTX 4090 (NVIDIA/nvbandwidth#15).
    "pcie4": Link("PCIe 4.0 x16", 25.0e9),
    # H100, nvbandwidth: 52.8 GB/s to the host (NVIDIA/nvbandwidth#24; its copies by kernels got
    # 35 to the device, which is not what prefetching does). Taken for both directions.
    "pcie5": Link("PCIe 5.0 x16", 52.8e9),
    # GH200 480GB, nvbandwidth's host_to_device_memcpy_ce: 346 GB/s (NVIDIA/nvbandwidth#23).
    "nvlink-c2c": Link("NVLink-C2C", 346.0e9),
}
"""Links by name; nothing here was measured by us."""


class StreamedWeights(FileModel):
    """Weights of the target that every pass reads from outside the device's memory."""

    bytes_per_pass: float = Field(gt=0)
    """Bytes of these weights, on each device of a tensor-parallel group."""
    bytes_per_second: float = Field(gt=0, description="Achieved, of each device.")
    source: str = Field(min_length=1, description="Where they lie and how they come, in words.")
    overlaps: bool
    """Whether reading goes on while the device computes: a pass takes the longer of both, and else
    both."""
    tile_rows: int | None = Field(default=None, ge=1)
    """Rows of a tile of the matrix products, where these read the weights themselves, once for each
    tile; none: weights are copied once for all rows."""
    buffer_bytes: float = Field(default=0.0, ge=0)  # memory that they pass through, on each device

    def read_seconds(self, rows: float) -> float:
        """Seconds to read them for one pass over so many rows (tokens of all requests)."""
        reads = 1 if self.tile_rows is None else math.ceil(rows / self.tile_rows)
        return reads * self.bytes_per_pass / self.bytes_per_second

    def pass_seconds(self, rows: float, computing: float) -> float:
        """Seconds of a pass over so many rows that takes ``computing`` seconds without reading."""
        reading = self.read_seconds(rows)
        return max(reading, computing) if self.overlaps else reading + computing

    @property
    def from_device_bytes(self) -> float:
        """Bytes of the target that lie in the device's own memory."""
        return 0.0 if self.tile_rows is not None else self.bytes_per_pass
