"""Runs a command of ours as on a CPU with AVX2 alone: ``python -m benchmarks.avx2 bench --eager``.

Torch, torch.compile, our kernels, oneDNN, MKL and vLLM's own library leave AVX-512 out, so that
AMD's EPYCs of generations 1 to 3 can be tried on newer CPUs.
"""

import os
from pathlib import Path

SETTINGS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm-avx2"),  # compiled code is another
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines run here, where vLLM is told
}
_NEWER = ("avx512", "avx10", "avx_vnni", "amx")


def restrict() -> None:
    """Restricts this process, before it imports torch or vLLM."""
    os.environ.update(SETTINGS)
    import torch

    capabilities = torch.cpu.get_capabilities()
    found = {name: has for name, has in capabilities.items() if not name.startswith(_NEWER)}
    torch.cpu.get_capabilities = lambda: found  # vLLM asks it which of its libraries to load


if __name__ == "__main__":
    restrict()
    from sequoia_vllm.cli import app

    app()
