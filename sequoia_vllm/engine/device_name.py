"""The name of the device that this engine runs on, as the driver or the system gives it."""

from __future__ import annotations

import platform
from pathlib import Path


def current_device_name() -> str:
    """E.g. "NVIDIA H200", or a CPU's model name."""
    from vllm.platforms import current_platform

    return cpu_model_name() if current_platform.is_cpu() else current_platform.get_device_name()


def cpu_model_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model name; its architecture where the system tells no more."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
