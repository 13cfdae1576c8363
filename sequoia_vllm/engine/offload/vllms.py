"""vLLM's own weight offloading: the backend that is asked for, and bytes that were offloaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sequoia_vllm.hardware.offloading import OffloadBackend

logger = logging.getLogger("vllm.sequoia")

_GIB = 1 << 30
_ADVICE = {
    "prefetch": "see whether --offload-group-size is at most the number of its layers, and "
    "--offload-params, if given, names parameters of them",
    "uva": "see whether --cpu-offload-params, if given, names parameters of its layers",
}


def offloading_backend(offload_config: Any) -> OffloadBackend | None:
    """The backend that is asked for, as vLLM chooses it; None: nothing is to be offloaded."""
    return chosen_backend(
        offload_config.offload_backend,
        offload_config.prefetch.offload_group_size,
        offload_config.uva.cpu_offload_gb,
    )


def chosen_backend(backend: str, group_size: int, cpu_offload_gb: float) -> OffloadBackend | None:
    """The same, from vLLM's options of these names."""
    if group_size > 0 and backend in ("auto", "prefetch"):
        return "prefetch"
    if cpu_offload_gb > 0 and backend in ("auto", "uva"):
        return "uva"
    return None


@dataclass(frozen=True)
class OffloadedWeights:
    """Where the weights of a loaded model lie, of one device's share.

    Attributes:
        total: Bytes of all.
        offloaded: How many of those are in host memory.
        buffers: Bytes of device memory that offloaded weights are copied to.
    """

    total: int
    offloaded: int
    buffers: int

    @classmethod
    def of(cls, model: nn.Module, offloader: Any, device: torch.device) -> OffloadedWeights:
        """Counts the bytes that are there, whatever was asked for."""
        parameters = list(model.parameters())
        total = sum(parameter.nbytes for parameter in parameters)
        # With the prefetch backend the model's parameters are the buffers on the device.
        if modules := getattr(offloader, "module_offloaders", ()):
            copied = sum(info.num_bytes for module in modules for info in module.get_param_infos())
            pool = offloader.buffer_pool
            return cls(total, copied if pool else 0, pool.total_bytes if pool else 0)
        # With UVA, views of host memory are marked; without it parameters are moved there.
        in_place = [
            parameter.nbytes
            for parameter in parameters
            if getattr(parameter, "_vllm_is_uva_offloaded", False)
            or parameter.device.type != device.type
        ]
        return cls(total, sum(in_place), 0)


def report_offloading(
    model: nn.Module, offloader: Any, device: torch.device, offload_config: Any
) -> None:
    """Logs how much of the target is offloaded; a warning where that brings nothing.

    Args:
        model, offloader, device: See `OffloadedWeights.of`; the target.
        offload_config: vLLM's ``OffloadConfig``.
    """
    backend = offloading_backend(offload_config)
    if backend is None:
        return
    weights = OffloadedWeights.of(model, offloader, device)
    total, offloaded, buffers = map(_gib, (weights.total, weights.offloaded, weights.buffers))
    if weights.offloaded == 0:
        logger.warning(
            "Sequoia: offloading is asked for (%s), but none of the target's weights (%s) are "
            "offloaded: %s",
            backend, total, _ADVICE[backend],
        )  # fmt: skip
    elif weights.buffers >= weights.offloaded:
        logger.warning(
            "Sequoia: %s of the target's weights are offloaded (%s), but their buffers on the "
            "device take as much (%s): lower --offload-prefetch-step",
            offloaded, backend, buffers,
        )  # fmt: skip
    else:
        through = f", through buffers of {buffers}" if weights.buffers else ""
        logger.info(
            "Sequoia: %s of %s of the target's weights are offloaded (%s%s); the draft's are not",
            offloaded, total, backend, through,
        )  # fmt: skip


def _gib(number: int) -> str:
    return f"{number / _GIB:.3g} GiB"
