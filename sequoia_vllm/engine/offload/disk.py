"""vLLM's offloader for weights on a disk: CPUs have none of vLLM's."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.offloader.base import BaseOffloader, set_offloader
from vllm.v1.worker.cpu_worker import CPUWorker

from sequoia_vllm.config import OffloadSpec
from sequoia_vllm.engine.offload import offload_of
from sequoia_vllm.engine.offload.layer_ring import LayerRing, keep_freed_memory
from sequoia_vllm.engine.offload.weight_file import OffloadError, Region, WeightFile

logger = logging.getLogger("vllm.sequoia")

_LEAST = 64 << 10  # smaller weights (norms, biases, scales) stay in memory
_ALIGNED = 64  # bytes, of a weight within its layer: a line of the CPU's caches


@dataclass
class _Weight:
    """A weight of a layer, at ``offset`` bytes into the layer's region."""

    name: str
    offset: int
    mapped: torch.Tensor


@dataclass
class _Layer:
    """A decoder layer whose weights are on the disk; sizes in bytes."""

    module: nn.Module  # the layer
    size: int  # bytes of its weights as they are loaded
    weights: list[_Weight] = field(default_factory=list)
    region: Region = field(init=False)
    mapped: torch.Tensor = field(init=False)  # the region's bytes, until it is sealed

    def check_kept(self) -> None:
        """Refuses a layer whose kernels keep its weights in memory of their own."""
        if sum(weight.nbytes for _, weight in _large(self.module)) < self.size // 2:
            raise OffloadError(
                f"{type(self.module).__name__}: the CPU kernels of this quantisation keep "
                "weights in memory of their own, which cannot be read from a disk: leave offload "
                "out, or serve a checkpoint that is not quantised"
            )

    def take_back(self) -> None:
        """Moves weights that were packed, into memory, to where they were loaded to."""
        own = dict(self.module.named_parameters())
        for weight in self.weights:
            packed = own.get(weight.name)
            if packed is None or packed.nbytes != weight.mapped.nbytes:
                continue  # `_seal` finds another place for it
            if _storage(packed) != _storage(self.mapped):
                weight.mapped = _place(self.mapped, weight.offset, packed)
                weight.mapped.copy_(packed.data)
                packed.data = weight.mapped


class DiskOffloader(BaseOffloader):
    """Keeps the target's decoder layers on a disk, and reads them ahead of their computation.

    A layer's weights are mapped to a file as soon as vLLM has built the layer, so a checkpoint of
    any size is loaded. Weights that vLLM packs for its kernels go back there, module by module.
    `post_init` gives each weight its place in a ring of buffers. Layers wait with vLLM's operations
    for prefetching, which compiled models keep in order. `WeightFile` says what it refuses.
    """

    def __init__(self, spec: OffloadSpec) -> None:
        self._spec = spec
        self._file = WeightFile(spec.directory)
        self._layers: list[_Layer] = []
        self._has_target = False
        self._ring: LayerRing | None = None
        self._resident = 0
        self._modules: list[nn.Module] = []

    def wrap_modules(self, modules_generator: Iterable[nn.Module], prefix: str = "") -> list[Any]:
        """Lets vLLM load the target's layers into the file; a draft's layers stay in memory."""
        if self._has_target:
            return list(modules_generator)  # of the draft, whose model is built after the target's
        self._has_target = True
        most = int(self._spec.memory_gib * 2**30)
        for module in modules_generator:
            _check_unshared([*self._modules, module])
            self._modules.append(module)
            size = sum(weight.nbytes for _, weight in _large(module))
            if self._layers or self._resident + size > most:
                self._take(module, size)
            else:
                self._resident += size
        return list(self._modules)

    def _take(self, module: nn.Module, size: int) -> None:
        layer = _Layer(module, size)
        if size:
            self._map(layer)
            self._layers.append(layer)
            # vLLM shall not pack unquantised weights into memory that only oneDNN knows. A product
            # takes plain ones, too, and reorders them at each call: a few per cent of the time in
            # which they come from a disk, while others are read.
            for part in module.modules():
                if isinstance(getattr(part, "quant_method", None), UnquantizedLinearMethod):
                    part._cpu_skip_gemm_dispatch = True
            _take_back_once_packed(layer)
            _hook(module, len(self._layers) - 1)

    def _map(self, layer: _Layer) -> None:
        """Moves a layer's weights, as they are, into a new region of the file."""
        large, layer.weights = _large(layer.module), []
        sizes = (-(-weight.nbytes // _ALIGNED) * _ALIGNED for _, weight in large)
        *offsets, length = accumulate(sizes, initial=0)
        layer.region, layer.mapped = self._file.region(length)
        for (name, weight), offset in zip(large, offsets, strict=True):
            mapped = _place(layer.mapped, offset, weight)
            _copy_what_is_not_zero(weight.data, mapped)
            weight.data = mapped
            layer.weights.append(_Weight(name, offset, mapped))

    def post_init(self) -> None:
        """Seals the file, once weights are as kernels want them, and begins to read.

        Raises:
            OffloadError: There are no layers to offload, they share weights, or their kernels keep
                weights in memory.
        """
        if self._ring is not None:
            return
        _check_unshared(self._modules)
        layers = self._layers
        if not layers:
            why = "vLLM builds no decoder layers of this model one by one"
            if self._resident:
                why = "all layers fit in memory_gib; leave offload out"
            raise OffloadError(f"no weights were offloaded: {why}")
        regions = [self._seal(layer) for layer in layers]
        self._ring = LayerRing(self._file, regions, self._spec.buffers)
        for number, layer in enumerate(layers):
            buffer = self._ring.bytes_of(number)
            for weight, (_, parameter) in zip(layer.weights, _large(layer.module), strict=True):
                parameter.data = _place(buffer, weight.offset, parameter)
            layer.weights.clear()
        self._ring.start()
        logger.info(
            "Sequoia: %.2f GiB of the target's weights (%d layers) are read from %s in every pass, "
            "through %d buffers of %.0f MiB; %.2f GiB of its layers stay in memory",
            self.streamed_bytes / 2**30, len(layers), self._spec.directory, self._ring.buffers,
            self._ring.memory / self._ring.buffers / 2**20, self._resident / 2**30,
        )  # fmt: skip

    def _seal(self, layer: _Layer) -> Region:
        """Seals the layer's region with its weights as they are now."""
        layer.check_kept()
        large = _large(layer.module)
        here = {weight.name: weight.mapped.data_ptr() for weight in layer.weights}
        if {name: weight.data_ptr() for name, weight in large} != here:
            self._map(layer)  # they were packed, and take another size
        self._file.seal(layer.region, layer.mapped)
        del layer.mapped
        return layer.region

    def _wait_for_layer(self, layer_idx: int) -> None:
        """Called by vLLM's operation ``wait_prefetch``, before a layer."""
        assert self._ring is not None, "a layer was run before its weights were ready"
        self._ring.wait(layer_idx)

    def _start_prefetch(self, layer_idx: int) -> None:
        """Called by vLLM's operation ``start_prefetch``, after a layer."""
        assert self._ring is not None
        self._ring.release(layer_idx)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are read in every pass of the target."""
        return sum(layer.region.length for layer in self._layers)

    def close(self) -> None:
        """Ends reading, and gives the disk's space back."""
        if self._ring is not None:
            self._ring.close()
        self._file.close()


def _large(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, weight)
        for name, weight in module.named_parameters()
        if weight.nbytes >= _LEAST and weight.device.type == "cpu"
    ]


def _check_unshared(modules: Sequence[nn.Module]) -> None:
    """Refuses layers that share a weight, as each layer has a buffer of its own."""
    places: set[int] = set()
    for module in modules:
        own = {_storage(weight) for _, weight in _large(module)}
        if own & places:
            raise OffloadError(
                f"{type(module).__name__}: decoder layers of this model share weights, which are "
                "read from a disk for one layer at a time: leave offload out"
            )
        places |= own


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(region: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Views part of a region as a tensor of a weight's shape, strides and dtype."""
    storage = region[offset : offset + like.nbytes].view(like.dtype)
    return storage.as_strided(like.shape, like.stride(), storage.storage_offset())


def _copy_what_is_not_zero(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies into a file of zeros: most memory of a layer just built was never written to."""
    if not source.is_contiguous():
        target.copy_(source)
        return
    size = (8 << 20) // source.element_size()
    for old, new in zip(source.view(-1).split(size), target.view(-1).split(size), strict=True):
        if old.view(torch.uint8).any():
            new.copy_(old)


def _take_back_once_packed(layer: _Layer) -> None:
    """Has a layer take its weights back after each of its modules was packed.

    Without this, all packed weights would be in memory before `DiskOffloader.post_init`.
    """

    def processed(process: Callable[[nn.Module], None], module: nn.Module) -> None:
        process(module)
        layer.check_kept()
        layer.take_back()

    for method in {getattr(module, "quant_method", None) for module in layer.module.modules()}:
        if isinstance(method, QuantizeMethodBase):
            process = method.process_weights_after_loading
            method.process_weights_after_loading = partial(processed, process)


def _hook(layer: nn.Module, number: int) -> None:
    """Has the layer wait for its weights, and say when it is done with them."""
    forward = layer.forward

    def streamed(*args: Any, **kwargs: Any) -> Any:
        hidden = _activations((*args, *kwargs.values()))
        torch.ops.vllm.wait_prefetch(hidden, number)
        output = forward(*args, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        torch.ops.vllm.start_prefetch(_activations(outputs), number)
        return output

    layer.forward = streamed


def _activations(values: tuple[Any, ...]) -> torch.Tensor:
    """Finds the first tensor that depends on weights: positions, which come first, do not."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise OffloadError("a decoder layer takes or gives no activations: leave offload out")


def _needs_weights_in_memory(name: str) -> Callable[..., Any]:
    """A method of vLLM's worker that is refused, by its name, while weights are on a disk."""

    def method(self: "OffloadingCPUWorker", *args: Any, **kwargs: Any) -> Any:
        if self._offloader is not None:
            raise OffloadError(
                f"{name} reads or writes all of the target's weights, and offload keeps them on a "
                "disk: start another engine for other weights, or leave offload out"
            )
        return getattr(CPUWorker, name)(self, *args, **kwargs)

    return method


class OffloadingCPUWorker(CPUWorker):
    """vLLM's CPU worker; offloads where the engine's configuration asks for it."""

    _offloader: DiskOffloader | None = None

    # Refused where weights are on a disk: offloaded layers' parameters are buffers that they share.
    reload_weights = _needs_weights_in_memory("reload_weights")
    reset_weights = _needs_weights_in_memory("reset_weights")
    compute_weight_checksums = _needs_weights_in_memory("compute_weight_checksums")
    save_sharded_state = _needs_weights_in_memory("save_sharded_state")
    save_tensorized_model = _needs_weights_in_memory("save_tensorized_model")

    # Until: vLLM has a place for tensors of speculators that are not weights.
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model with our offloader, and calls its ``post_init``: V1 on CPUs does not."""
        spec = offload_of(self.vllm_config.additional_config)
        if spec is not None:
            self._offloader = DiskOffloader(spec)
            set_offloader(self._offloader)
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self._offloader is not None:
            self._offloader.post_init()
            # Memory that loading freed is given back. From here on only activations are freed.
            keep_freed_memory()

    def shutdown(self) -> Any:
        """Shuts the worker down, then gives the disk's space back."""
        ended = super().shutdown()
        if self._offloader is not None:
            set_offloader(None)
            self._offloader.close()
            self._offloader = None
        return ended
