"""Names of library trees, ``DEVICE/CLASS/VECTOR``, and this machine's device."""

from __future__ import annotations

import shutil
import subprocess

from sequoia_vllm.hardware.device import current_cpu_name, identify
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.library.tree_reference import is_tree_file


def device_in(name: str) -> str:
    """The device's id in a tree's name; ``user`` for trees tuned here."""
    return name.split("/")[0]


def class_in(name: str) -> str:
    """The model class in a tree's name."""
    return name.split("/")[1]


def names_device(reference: str) -> bool:
    """Whether this names a device with trees in the library, not a tree or a file."""
    if "/" in reference or not reference.strip() or is_tree_file(reference):
        return False
    return identify(reference).id in TreeLibrary().devices()


def this_device() -> str | None:
    """The id of this machine's device; None: it is unknown."""
    return identify(this_device_name()).id


def this_device_name() -> str:
    """The driver's name of this machine's first GPU, else its CPU's name."""
    name = current_cpu_name()
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
        name = found.stdout.partition("\n")[0].strip() or name
    return name
