"""Configurations of models, read by commands that start no engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sequoia_vllm.cli.measuring import check_name
from sequoia_vllm.config import ConfigError
from sequoia_vllm.hardware.models import published_shape
from sequoia_vllm.hardware.support import Kind, Role, kinds_of
from sequoia_vllm.json_input import read_json
from sequoia_vllm.model_source import hub_problem


def read_config(role: Role, model: str) -> Mapping[str, Any]:
    """A model's ``config.json``, in its folder or downloaded.

    Raises:
        ConfigError: It is not available, or not what it should be; the message names the fix.
    """
    file = _config_file(role, model)
    config = read_json(file, "configuration", ConfigError)
    if not isinstance(config, dict):
        raise ConfigError(f"configuration file {file} is no JSON object: is it the right one?")
    return config


def unsupported_kinds(role: Role, model: str) -> set[Kind]:
    """The kinds of model, among those that trees do not serve, that a model is.

    Raises:
        ConfigError: Its configuration is not available.
    """
    is_known = not Path(model).exists() and published_shape(model) is not None
    return set() if is_known else kinds_of(read_config(role, model))


def _config_file(role: Role, model: str) -> Path:
    check_name(role, model)
    if Path(model).exists():
        return Path(model) / "config.json"
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # its type depends on the HTTP library
        raise ConfigError(f"the {role}: {hub_problem(model, error)}") from error
