"""Names the worker that offloads, where an engine is asked to, and refuses where it cannot."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.offload.settings import offload_of
from sequoia_vllm.offload.weight_file import filesystem_of

_WORKER = "sequoia_vllm.engine.offload.worker.OffloadingCPUWorker"
# vLLM's own, as its platform names it, and those of ours that offload.
_PLAIN = "vllm.v1.worker.cpu_worker.CPUWorker"
_OURS = "sequoia_vllm.engine.worker.worker_cpu"
_OFFLOADING = (_WORKER, f"{_OURS}.SequoiaCPUWorker", f"{_OURS}.PlainCPUWorker")


def choose_offloading(vllm_config: Any) -> None:
    """Gives an engine with an ``offload`` the worker for it; others stay as they are.

    Raises:
        ConfigError: It cannot offload; the message names the fix.
        OffloadError: There is no such directory.
    """
    spec = offload_of(vllm_config.additional_config)
    if spec is None:
        return
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if not current_platform.is_cpu():
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
    if parallel.worker_cls not in (_PLAIN, *_OFFLOADING):
        raise ConfigError(
            f"worker_cls is {parallel.worker_cls!r}: offload brings its own; leave it at 'auto'"
        )
    filesystem_of(spec.directory)
    if parallel.worker_cls == _PLAIN:
        parallel.worker_cls = _WORKER
