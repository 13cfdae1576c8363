"""Where the front end leaves what shall be offloaded: in vLLM's ``additional_config``.

Any engine's, so that plain decoding and vLLM's own chain stream their weights, too:
``--additional-config '{"sequoia_offload": {"weights": "disk", "directory": "/data"}}'``.
It is part of what vLLM keys its compiled code by, as it has to be: layers wait for weights there.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from sequoia_vllm.config import ConfigError, OffloadSpec, problems_of

KEY = "sequoia_offload"


def offload_of(additional_config: Any) -> OffloadSpec | None:
    """What is asked for; None: nothing.

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
    """``additional_config`` with what the speculative config says of offloading.

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
