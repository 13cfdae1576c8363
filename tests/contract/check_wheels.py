"""Checks the contract in the sources of vLLM's GPU wheels: ``make contract``.

    python -m tests.contract.check_wheels DIRECTORY VERSION...

Downloads each wheel into DIRECTORY (some 340 MB) unless it lies there, unpacks
its Python files beside it, and reads them: nothing of vLLM is installed or
imported. So it tells that names and parameters are there, not that an engine
works; attributes that only instances have are not seen. Exits with 1 if a
version that we support differs; for others the differences are only shown.

`checked.json` keeps the result for supported versions. CI has no such wheel: it
fails where we expect something else of vLLM than what was checked last.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from sequoia_vllm.engine.compat.contract import contract
from sequoia_vllm.engine.compat.sources import source_differences
from sequoia_vllm.engine.compat.versions import SUPPORTED_VERSIONS
from sequoia_vllm.installed import file_hash

CHECKED = Path(__file__).with_name("checked.json")
# Of Linux on x86; vLLM's wheels are for every Python from 3.8 on.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux1_x86_64")


def main() -> int:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    supported = ", ".join(SUPPORTED_VERSIONS["gpu"])
    print(f"supported on GPUs: vLLM {supported}")
    results = [check(directory, version) for version in sys.argv[2:]]
    return 0 if all(results) else 1


def check(directory: Path, version: str) -> bool:
    """Prints how this version differs; False if it must not."""
    wheel, sources = unpacked(directory, version)
    expectations = contract("gpu", version=version)
    found = source_differences(sources, expectations)
    supported = version in SUPPORTED_VERSIONS["gpu"]
    wheel_hash = file_hash(wheel)
    print(f"\n{wheel.name}")
    print(f"  SHA-256 {wheel_hash}")
    print(
        f"  {'supported' if supported else 'not supported'}; "
        f"{len(found)} differences from {len(expectations)} expectations"
    )
    for difference in found:
        print(f"  - {difference}")
    if supported:
        checked = json.loads(CHECKED.read_text())
        checked[version] = {
            "expected": expected_hash(version), "wheel": wheel.name, "sha256": wheel_hash,
            "differences": found,
        }  # fmt: skip
        CHECKED.write_text(json.dumps(checked, indent=1, sort_keys=True) + "\n")
    return not (supported and found)


def expected_hash(version: str) -> str:
    """SHA-256 of all that we expect of this version on GPUs."""
    lines = sorted(map(repr, contract("gpu", version=version)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def unpacked(directory: Path, version: str) -> tuple[Path, Path]:
    """The version's wheel for CUDA, downloaded once, and the folder of its Python files."""
    pattern, sources = f"vllm-{version}-*.whl", directory / version
    if not list(directory.glob(pattern)):
        download(directory, version)
    wheel = min(directory.glob(pattern))
    if not sources.is_dir():
        partial = sources.with_name(sources.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(partial, names)
        partial.rename(sources)
    return wheel, sources


def download(directory: Path, version: str) -> None:
    """From PyPI, whose ``vllm`` is for CUDA."""
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    command = [
        sys.executable, "-m", "pip", "download", f"vllm=={version}", "--no-deps",
        "--only-binary", ":all:", "--python-version", "3.12", *platforms, "--dest", str(directory),
    ]  # fmt: skip
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
