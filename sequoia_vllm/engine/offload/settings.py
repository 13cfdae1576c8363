"""Settings of offloading to a disk, in vLLM's ``additional_config``, and the worker for it.

Any engine takes them, so that plain decoding and vLLM's own chain stream their weights, too:
``--additional-config '{"sequoia_offload": {"weights": "disk", "directory": "/data"}}'``.
vLLM keys its compiled code by them, as it has to: layers wait for weights there.
"""

from typing import Any

from pydantic import ValidationError

from sequoia_vllm.config import ConfigError, OffloadSpec, problems_of

KEY = "sequoia_offload"
_WORKER = "sequoia_vllm.engine.offload.worker.OffloadingCPUWorker"
# vLLM's own, as its platform names it, and those of ours that offload.
_PLAIN = "vllm.v1.worker.cpu_worker.CPUWorker"
_OURS = "sequoia_vllm.engine.worker.worker_cpu"
_OFFLOADING = (_WORKER, f"{_OURS}.SequoiaCPUWorker", f"{_OURS}.PlainCPUWorker")


def offload_of(additional_config: Any) -> OffloadSpec | None:
    """Reads what shall be offloaded; None: nothing.

    Raises:
        ConfigError: Naming each wrong key or value.
    """
    if not isinstance(additional_config, dict) or additional_config.get(KEY) is None:
        return None
    try:
        return OffloadSpec.model_validate(additional_config[KEY])
    except ValidationError as error:
        raise ConfigError(f"additional_config.{KEY}: {problems_of(error)}") from None


def with_offload(
    additional_config: dict[str, Any] | None, offload: OffloadSpec | None
) -> dict[str, Any]:
    """Adds what the speculative config says of offloading to ``additional_config``.

    Raises:
        ConfigError: It says something else already.
    """
    config = dict(additional_config or {})
    if offload is None:
        return config
    said = offload_of(config)
    if said not in (None, offload):
        raise ConfigError(
            f"the speculative config's offload and additional_config's {KEY} differ: give one"
        )
    return {**config, KEY: offload.model_dump(mode="json")}


def choose_offloading(vllm_config: Any) -> None:
    """Gives an engine with an ``offload`` the worker for it; others stay as they are.

    Raises:
        ConfigError: It cannot offload; the message names the fix.
        OffloadError: There is no such directory.
    """
    # Commands read settings, and start without vLLM and torch.
    from vllm.platforms import current_platform

    from sequoia_vllm.engine.offload.weight_file import filesystem_of

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
