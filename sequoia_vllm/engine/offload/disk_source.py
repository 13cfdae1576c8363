"""What reading weights from a disk costs, for the choice of a tree."""

from __future__ import annotations

from dataclasses import dataclass

from sequoia_vllm.config import OffloadSpec
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.roofline import bytes_per_value
from sequoia_vllm.hardware.streaming import StreamedWeights
from sequoia_vllm.offload import read_rate


@dataclass(frozen=True)
class DiskLayers:
    """Layers that our offloader keeps on a disk; see `WeightSource`.

    Attributes:
        spec: What is asked for.
    """

    spec: OffloadSpec

    @property
    def name(self) -> str:
        """All of it that trees depend on, in a word."""
        return self.spec.name

    def streamed(
        self, target: ModelShape, dtype: str, device: str, devices: int
    ) -> StreamedWeights | None:
        """See `WeightSource`; the disk is read for a moment. None: all layers stay in memory.

        Raises:
            ValueError: The type is not known.
            OffloadError: The directory cannot be used.
        """
        layer = target.layers_bytes(bytes_per_value(dtype)) / devices / target.layers
        resident = min(int(self.spec.memory_gib * 2**30 / layer), target.layers)
        if resident == target.layers:
            return None
        return StreamedWeights(
            bytes_per_pass=(target.layers - resident) * layer,
            # Ranks read from one disk.
            bytes_per_second=read_rate(self.spec.directory) / devices,
            source=f"a disk, {self.spec.buffers} buffers",
            overlaps=True,
            buffer_bytes=self.spec.buffers * layer,
        )
