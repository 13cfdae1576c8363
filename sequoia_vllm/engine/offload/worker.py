"""The part of CPU workers that loads a model whose weights stay on a disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.model_executor.offloader.base import set_offloader
from vllm.v1.worker.cpu_worker import CPUWorker

from sequoia_vllm.engine.offload import offload_of
from sequoia_vllm.engine.offload.disk import DiskOffloader
from sequoia_vllm.engine.offload.layer_ring import keep_freed_memory
from sequoia_vllm.engine.offload.weight_file import OffloadError


def _needs_weights_in_memory(name: str) -> Callable[..., Any]:
    """A method of vLLM's worker that is refused, by its name, while weights are on a disk."""

    def method(self: OffloadingCPUWorker, *args: Any, **kwargs: Any) -> Any:
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

    # Refused by name where weights are on a disk: parameters of offloaded layers are buffers that
    # layers share.
    reload_weights = _needs_weights_in_memory("reload_weights")
    reset_weights = _needs_weights_in_memory("reset_weights")
    compute_weight_checksums = _needs_weights_in_memory("compute_weight_checksums")
    save_sharded_state = _needs_weights_in_memory("save_sharded_state")
    save_tensorized_model = _needs_weights_in_memory("save_tensorized_model")

    # Until: vLLM has a place for tensors of speculators that are not weights.
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model with our offloader in place of the one for GPUs that vLLM's runner made.

        vLLM's V1 runner on CPUs does not say when weights are ready (``post_init``).
        """
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
