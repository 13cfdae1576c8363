"""Targets larger than memory: vLLM's own offloading on GPUs, and ours from a disk on CPUs.

This module is the door: which weights lie outside the devices' memory, and what that costs. Its
other files are ours: `disk` has the worker; `weight_file` and `layer_ring` know no vLLM.

Ours takes its settings from vLLM's ``additional_config`` (`KEY`), so that plain engines and vLLM's
own chains stream their weights, too. vLLM keys its compiled code by it: layers wait for weights.

Until: vLLM offloads weights on CPUs.

May import: compat.
"""

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sequoia_vllm.config import ConfigError, OffloadSpec, problems_of
from sequoia_vllm.engine.compat.contract import current_device
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.roofline import bytes_per_value
from sequoia_vllm.hardware.streaming import (
    OffloadBackend,
    StreamedWeights,
    host_link,
    streamed_layers,
)
from sequoia_vllm.library.pair_key import PairKey, PairShapes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.sequoia")

KEY = "sequoia_offload"
_WORKER = "sequoia_vllm.engine.offload.disk.OffloadingCPUWorker"
# vLLM's own, as its platform names it, and those of ours that offload.
_PLAIN = "vllm.v1.worker.cpu_worker.CPUWorker"
_OURS = "sequoia_vllm.engine.worker.worker_cpu"
_OFFLOADING = (_WORKER, f"{_OURS}.SequoiaCPUWorker", f"{_OURS}.PlainCPUWorker")
_GIB = 1 << 30
_ADVICE = {
    "prefetch": "see whether --offload-group-size is at most the number of its layers, and "
    "--offload-params, if given, names parameters of them",
    "uva": "see whether --cpu-offload-params, if given, names parameters of its layers",
}


def offload_of(additional_config: Any) -> OffloadSpec | None:
    """Reads what is to be read from a disk, and refuses wrong keys; None: nothing."""
    if not isinstance(additional_config, dict) or additional_config.get(KEY) is None:
        return None
    try:
        return OffloadSpec.model_validate(additional_config[KEY])
    except ValidationError as error:
        raise ConfigError(f"additional_config.{KEY}: {problems_of(error)}") from None


def with_offload(
    additional_config: dict[str, Any] | None, offload: OffloadSpec | None
) -> dict[str, Any]:
    """Adds the speculative config's offload; refuses another one in ``additional_config``."""
    config = dict(additional_config or {})
    if offload is None:
        return config
    if offload_of(config) not in (None, offload):
        raise ConfigError(
            f"the speculative config's offload and additional_config's {KEY} differ: give one"
        )
    return {**config, KEY: offload.model_dump(mode="json")}


def choose_offloading(vllm_config: Any) -> None:
    """Gives an engine with an ``offload`` the worker for it; other engines stay as they are.

    Raises:
        ConfigError: The engine cannot offload; the message names the fix.
        OffloadError: There is no such directory.
    """
    # Commands import this module, and start without torch.
    from sequoia_vllm.engine.offload.weight_file import filesystem_of

    spec = offload_of(vllm_config.additional_config)
    if spec is None:
        return
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if current_device() == "gpu":
        raise ConfigError(
            "offload is for CPUs: on GPUs use vLLM's --offload-backend prefetch or "
            "--cpu-offload-gb, which keep weights in the host's memory"
        )
    if model.is_multimodal_model or model.is_encoder_decoder:
        raise ConfigError(
            f"offload reads the layers of decoder-only models, and {model.model} has others: leave "
            "offload out"
        )
    if vllm_config.lora_config is not None:
        raise ConfigError("offload does not know adapters: drop --enable-lora, or offload")
    if vllm_config.weight_transfer_config is not None:
        raise ConfigError(
            "weights on a disk cannot be updated while the engine serves: drop "
            "--weight-transfer-config, or offload"
        )
    if parallel.worker_cls not in (_PLAIN, *_OFFLOADING):
        raise ConfigError(
            f"worker_cls is {parallel.worker_cls!r}: offload brings its own; leave it at 'auto'"
        )
    filesystem_of(spec.directory)
    if parallel.worker_cls == _PLAIN:
        parallel.worker_cls = _WORKER


def is_offloaded(vllm_config: Any) -> bool:
    """Whether some of the target's weights are read from outside the device in every pass."""
    return (
        offloading_backend(vllm_config.offload_config) is not None
        or offload_of(vllm_config.additional_config) is not None
    )


def offloading_backend(offload_config: Any) -> OffloadBackend | None:
    """The backend of vLLM's that is asked for, as vLLM chooses it; None: nothing is offloaded."""
    prefetch, uva = offload_config.prefetch, offload_config.uva
    return chosen_backend(
        offload_config.offload_backend, prefetch.offload_group_size, uva.cpu_offload_gb
    )


def chosen_backend(backend: str, group_size: int, cpu_offload_gb: float) -> OffloadBackend | None:
    """The same, from vLLM's options of these names."""
    if group_size > 0 and backend in ("auto", "prefetch"):
        return "prefetch"
    return "uva" if cpu_offload_gb > 0 and backend in ("auto", "uva") else None


@dataclass(frozen=True)
class OffloadedLayers:
    """Layers that vLLM's offloader keeps in the host's memory."""

    backend: OffloadBackend
    bytes_on_each: float | None = None
    """Bytes to offload on each device (UVA); None: ``layers_of_group`` says it."""
    layers_of_group: tuple[int, int] = (0, 1)
    """How many layers of each group of how many are offloaded (prefetch)."""
    buffers: int = 1  # layers that prefetching has buffers for
    parameters: tuple[str, ...] = ()
    """Only parameters with one of these in their name; none: all of a layer."""

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
        """The bytes of a pass and their rate.

        Returns:
            None: no whole layers are offloaded, or passes read only some of their parameters.

        Raises:
            ValueError: ``dtype`` is not known, or the size to offload is not above 0 and finite.
        """
        if self.parameters or (self.backend == "uva" and target.experts):
            return None
        value_bytes = bytes_per_value(dtype)
        size = self.bytes_on_each
        if size is None:
            count, group = self.layers_of_group  # the last ones of each whole group
            layers = sum(layer % group >= group - count for layer in range(target.layers))
            size = layers / target.layers * target.layers_bytes(value_bytes) / devices
        if size == 0:
            return None
        link = host_link(device)
        return streamed_layers(
            target, size, link.bytes_per_second, link.name,
            value_bytes=value_bytes, devices=devices, backend=self.backend, buffers=self.buffers,
        )  # fmt: skip


def with_streamed(
    shapes: PairShapes, source: OffloadedLayers | OffloadSpec | None, pair: PairKey
) -> PairShapes:
    """Adds to shapes how much of the target vLLM streams, or why that is not known."""
    if shapes.target is None or not isinstance(source, OffloadedLayers):
        return shapes
    problem = f"how much of the target {source.name} offloads is not known"
    try:
        found = source.streamed(shapes.target, pair.dtype, pair.device, pair.tensor_parallel_size)
    except ValueError as error:
        found, problem = None, str(error)
    return replace(shapes, streamed=found) if found else replace(shapes, problem=problem)


def weight_source(arguments: Any) -> OffloadedLayers | OffloadSpec | None:
    """Where an engine reads weights from in every pass; None: all lie in its devices' memory.

    Trees are chosen before there is an ``OffloadConfig``, so engine arguments are read. Its
    ``name`` is for `PairKey.offloading`.
    """
    if current_device() == "cpu":
        return offload_of(arguments.additional_config)
    return offloaded_layers(arguments)


def offloaded_layers(arguments: Any) -> OffloadedLayers | None:
    """Reads what vLLM's offloader is asked to do, by its rules; None: nothing."""
    backend = chosen_backend(
        arguments.offload_backend, arguments.offload_group_size, arguments.cpu_offload_gb
    )
    if backend == "prefetch":
        return OffloadedLayers(
            backend,
            layers_of_group=(arguments.offload_num_in_group, arguments.offload_group_size),
            buffers=arguments.offload_prefetch_step,
            parameters=tuple(sorted(arguments.offload_params)),
        )
    parameters = tuple(sorted(arguments.cpu_offload_params))
    size = arguments.cpu_offload_gb * _GIB
    return backend and OffloadedLayers(backend, bytes_on_each=size, parameters=parameters)


def offloaded_bytes(
    model: "torch.nn.Module", offloader: Any, device: "torch.device"
) -> tuple[int, int, int]:
    """Where one device's share of a loaded model's weights lies, whatever was asked for: the bytes
    of all weights, of those in host memory, and of their buffers on the device."""
    parameters = list(model.parameters())
    total = sum(parameter.nbytes for parameter in parameters)
    # With the prefetch backend the model's parameters are the buffers on the device.
    if modules := getattr(offloader, "module_offloaders", ()):
        copied = sum(info.num_bytes for module in modules for info in module.get_param_infos())
        pool = offloader.buffer_pool
        return total, copied if pool else 0, pool.total_bytes if pool else 0
    # With UVA, views of host memory are marked; without it parameters are moved there.
    in_place = (
        parameter.nbytes
        for parameter in parameters
        if getattr(parameter, "_vllm_is_uva_offloaded", False)
        or parameter.device.type != device.type
    )
    return total, sum(in_place), 0


def report_offloading(
    model: "torch.nn.Module", offloader: Any, device: "torch.device", offload_config: Any
) -> None:
    """Logs how much of the target vLLM has offloaded; a warning where that brings nothing."""
    backend = offloading_backend(offload_config)
    if backend is None:
        return
    sizes = offloaded_bytes(model, offloader, device)
    total, offloaded, buffers = (f"{size / _GIB:.3g} GiB" for size in sizes)
    if sizes[1] == 0:
        logger.warning(
            "Sequoia: offloading is asked for (%s), but none of the target's weights (%s) are "
            "offloaded: %s",
            backend, total, _ADVICE[backend],
        )  # fmt: skip
    elif sizes[2] >= sizes[1]:
        logger.warning(
            "Sequoia: %s of the target's weights are offloaded (%s), but their buffers on the "
            "device take as much (%s): lower --offload-prefetch-step",
            offloaded, backend, buffers,
        )  # fmt: skip
    else:
        through = f", through buffers of {buffers}" if sizes[2] else ""
        logger.info(
            "Sequoia: %s of %s of the target's weights are offloaded (%s%s); the draft's are not",
            offloaded, total, backend, through,
        )  # fmt: skip
