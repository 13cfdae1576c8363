"""What vLLM's options say of weights outside the devices' memory: its offloading of layers.

Trees are chosen while vLLM makes the speculative configuration, before there is an
``OffloadConfig``. So the engine's arguments are read, from which it is made.
"""

from dataclasses import dataclass, replace
from typing import Any

from vllm.platforms import current_platform

from sequoia_vllm.config import OffloadSpec
from sequoia_vllm.engine.offload.settings import offload_of
from sequoia_vllm.engine.offload.vllms import chosen_backend
from sequoia_vllm.hardware.models import ModelShape, PairShapes
from sequoia_vllm.hardware.offloading import OffloadBackend, host_link, streamed_layers
from sequoia_vllm.hardware.roofline import bytes_per_value
from sequoia_vllm.hardware.streaming import LINKS, StreamedWeights

_GIB = 2**30


@dataclass(frozen=True)
class OffloadedLayers:
    """Layers that vLLM's offloader keeps in the host's memory.

    Attributes:
        backend: ``"prefetch"`` or ``"uva"``.
        bytes_on_each: Bytes to offload on each device (UVA); None: ``layers_of_group`` says it.
        layers_of_group: How many layers of each group of how many are offloaded (prefetch).
        buffers: Layers that prefetching has buffers for.
        parameters: Only parameters with one of these in their name; none: all of a layer.
    """

    backend: OffloadBackend
    bytes_on_each: float | None = None
    layers_of_group: tuple[int, int] = (0, 1)
    buffers: int = 1
    parameters: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """All settings in one word."""
        if self.bytes_on_each is not None:
            words = [self.backend, f"{self.bytes_on_each / _GIB:g}gib"]
        else:
            offloaded, size = self.layers_of_group
            words = [self.backend, f"{offloaded}-of-{size}", f"{self.buffers}-ahead"]
        return "-".join([*words, *self.parameters])

    def streamed(
        self, target: ModelShape, dtype: str, device: str, devices: int
    ) -> StreamedWeights | None:
        """The bytes of a pass and their rate; None where passes read only some of the parameters.

        Raises:
            ValueError: If the type is not known.
        """
        if self.parameters or (self.backend == "uva" and target.experts):
            return None
        value_bytes = bytes_per_value(dtype)
        size = self.bytes_on_each
        if size is None:
            share = self._layers(target.layers) / target.layers
            size = share * target.layers_bytes(value_bytes) / devices
        if size == 0:
            return None
        link, words = host_link(device)
        return streamed_layers(
            target, size, LINKS[link].bytes_per_second, words,
            value_bytes=value_bytes, devices=devices, backend=self.backend, buffers=self.buffers,
        )  # fmt: skip

    def _layers(self, layers: int) -> int:
        """Counts offloaded layers: the last ones of each whole group."""
        offloaded, size = self.layers_of_group
        return sum(layer % size >= size - offloaded for layer in range(layers))


def with_streamed(
    shapes: PairShapes, source: OffloadedLayers, dtype: str, device: str, devices: int
) -> PairShapes:
    """Adds to shapes how much of the target is streamed, or why that is not known.

    Arguments as of `OffloadedLayers.streamed`.
    """
    if shapes.target is None:
        return shapes
    try:
        found = source.streamed(shapes.target, dtype, device, devices)
    except ValueError as error:
        return replace(shapes, problem=str(error))
    if found is None:
        return replace(
            shapes, problem=f"how much of the target {source.name} offloads is not known"
        )
    return replace(shapes, streamed=found)


def weight_source(arguments: Any) -> OffloadedLayers | OffloadSpec | None:
    """Where an engine reads weights from in every pass; None: all lie in its devices' memory.

    On CPUs vLLM's offloaders do nothing, and ours reads from a disk.

    Returns:
        Its ``name`` is for `PairKey.offloading`.
    """
    if current_platform.is_cpu():
        return offload_of(arguments.additional_config)
    return offloaded_layers(arguments)


def offloaded_layers(arguments: Any) -> OffloadedLayers | None:
    """Reads what vLLM's offloader is asked to do, by its rules; None: nothing."""
    backend = chosen_backend(
        arguments.offload_backend, arguments.offload_group_size, arguments.cpu_offload_gb
    )
    if backend is None:
        return None
    if backend == "prefetch":
        return OffloadedLayers(
            "prefetch",
            layers_of_group=(arguments.offload_num_in_group, arguments.offload_group_size),
            buffers=arguments.offload_prefetch_step,
            parameters=tuple(sorted(arguments.offload_params)),
        )
    return OffloadedLayers(
        "uva",
        bytes_on_each=arguments.cpu_offload_gb * _GIB,
        parameters=tuple(sorted(arguments.cpu_offload_params)),
    )
