"""The device that is checked, and what is written down about it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.results import GpuRunError
from sequoia_vllm import __version__
from sequoia_vllm.installed import installed_versions
from sequoia_vllm.measuring.provenance import git_revision

_PACKAGES = ("torch", "triton", "numpy", "vllm", "sequoia-vllm")
NO_GPU = (
    "no CUDA device: torch.cuda.is_available() is false. Run this on a machine with a GPU, or, to "
    "try everything but timing on a CPU, with TRITON_INTERPRET=1 in the environment and --tiny"
)


@dataclass(frozen=True)
class Machine:
    """Where the check runs."""

    device: torch.device
    interpreted: bool

    @classmethod
    def find(cls, tiny: bool) -> Machine:
        """The GPU; or, for ``tiny`` checks under the interpreter, the CPU."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if interpreted and tiny:
            return cls(torch.device("cpu"), True)
        if interpreted:
            raise GpuRunError(
                "TRITON_INTERPRET=1 runs kernels in Python: unset it, or add --tiny to try "
                "everything but timing"
            )
        if not torch.cuda.is_available():
            raise GpuRunError(NO_GPU)
        return cls(torch.device("cuda", torch.cuda.current_device()), False)

    @property
    def name(self) -> str:
        """The device's name, from its driver."""
        return "cpu" if self.interpreted else torch.cuda.get_device_name(self.device)

    @property
    def free_bytes(self) -> int:
        """Memory that can still be had."""
        if self.interpreted:
            return 1 << 30
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def provenance(self) -> dict[str, Any]:
        """Arguments, time, versions, commit and device, as plain data."""
        return {
            "device": self.name,
            "interpreted": self.interpreted,
            "argv": sys.argv,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "sequoia_vllm": __version__,
            "commit": git_revision(),
            "python": platform.python_version(),
            "versions": installed_versions(_PACKAGES),
            "cuda": torch.version.cuda,
            "properties": self._properties(),
        }

    def _properties(self) -> dict[str, Any]:
        if self.interpreted:
            return {"name": self.name}
        found = torch.cuda.get_device_properties(self.device)
        return {
            "name": found.name, "capability": [found.major, found.minor],
            "multiprocessors": found.multi_processor_count, "memory_bytes": found.total_memory,
            "l2_bytes": getattr(found, "L2_cache_size", None), "driver": _driver(),
        }  # fmt: skip


def _driver() -> str | None:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else None


def used_gib() -> float | None:
    """Memory in use on the first GPU, by all processes, GiB; None: no driver says."""
    lines = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return round(int(lines.splitlines()[0]) / 1024, 1) if lines else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
