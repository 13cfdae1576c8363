"""Writes the pages of tests/kernels/compiled, one for each Triton that we support.

    python -m benchmarks.compiled.record DIRECTORY [VERSION...]

Installs each Triton (some 200 MB, for this process's Python) into a folder of
DIRECTORY unless it lies there; nothing else of the environment changes. Kernels whose
sources a page was written from are not compiled again; all of them take some minutes
of two processors per version. Exits with 1 if a variant does not compile.
"""

import os
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.7.1", "3.8.0", "3.9.0")
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Records with every version; 1 if that fails for one."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1]).absolute()
    codes = [record(directory, version) for version in sys.argv[2:] or VERSIONS]
    return 1 if any(codes) else 0


def record(directory: Path, version: str) -> int:
    """Compiles with this version; the exit code."""
    packages = directory / f"triton-{version}"
    if not packages.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", packages, f"triton=={version}"], check=True)
    path = os.pathsep.join(map(str, (packages, ROOT)))
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compiled"]
    pages = ROOT / "tests" / "kernels" / "compiled"
    print(f"Triton {version}", flush=True)
    return subprocess.run(
        [*command, "--record", pages], env={**kept, "PYTHONPATH": path}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
