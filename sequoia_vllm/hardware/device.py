"""Devices: their datasheet values, the names drivers give them, and nearest neighbours."""

import datetime
import difflib
import math
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.json_input import read_json

_FILE = Path(__file__).with_name("devices.json")
X86_CPU = "x86-cpu"
InterconnectKind = Literal["switch", "mesh", "bus", "host"]
LinkName = Literal["pcie3", "pcie4", "pcie5", "nvlink-c2c"]


class Link(NamedTuple):
    """A way from the host's memory to a device's."""

    name: str
    bytes_per_second: float  # measured rate of copies from pinned memory


LINKS: dict[LinkName, Link] = {
    # 8 GT/s, 16 lanes, 128b/130b. An author of BaM (ZaidQureshi/bam#54): 12 GB/s on a V100.
    "pcie3": Link("PCIe 3.0 x16", 12.0e9),
    # nvbandwidth's host_to_device_memcpy_ce: 24.8 GB/s on eight A100 SXM4 (NVIDIA's developer
    # forum, 352186), 23.9 to 26.4 on eight RTX 4090 (NVIDIA/nvbandwidth#15).
    "pcie4": Link("PCIe 4.0 x16", 25.0e9),
    # H100, nvbandwidth: 52.8 GB/s to the host (NVIDIA/nvbandwidth#24; its copies by kernels got
    # 35 to the device, which is not what prefetching does). Taken for both directions.
    "pcie5": Link("PCIe 5.0 x16", 52.8e9),
    # GH200 480GB, nvbandwidth's host_to_device_memcpy_ce: 346 GB/s (NVIDIA/nvbandwidth#23).
    "nvlink-c2c": Link("NVLink-C2C", 346.0e9),
}  # links by name; nothing here was measured by us


class DeviceError(SequoiaError, ValueError):
    """A device that nothing is known about; says what to do."""


class DeviceSpec(FileModel):
    """Datasheet values of one accelerator."""

    id: str = Field(min_length=1, description="Our name; the library file's name.")
    name: str = Field(min_length=1, description="The maker's name.")
    memory_gb: float = Field(gt=0)  # as printed; makers count in 2^30 bytes, see `memory_bytes`
    bandwidth_gb_s: float = Field(gt=0, description="Memory bandwidth, 10^9 bytes/s.")
    bf16_tflops: float = Field(gt=0)
    """Dense bfloat16 matrix rate, without sparsity, float32 accumulation, 10^12/s (float16 where
    the device has no bfloat16)."""
    interconnect: str = Field(description="Link between devices of one node.")
    interconnect_kind: InterconnectKind
    """switch: a device reaches any other at its full rate; mesh: eight devices, an equal link to
    each of the seven others; bus: PCIe, devices read each other's memory; host: PCIe, they do not
    (GeForce drivers), and go through the host's."""
    interconnect_gb_s: float = Field(gt=0, le=1e6)
    """Rate of a device's links together in one direction, 10^9 bytes/s: half of what NVLink and
    Infinity Fabric are printed with, what PCIe is printed with."""
    source: str = Field(min_length=1, description="Document the values are from.")
    date: datetime.date = Field(description="Day the values were looked up.")
    note: str | None = Field(default=None, description="What is uncertain about them.")

    @property
    def ridge(self) -> float:
        """Operations per byte at which compute takes as long as memory."""
        return self.bf16_tflops * 1e3 / self.bandwidth_gb_s

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes.
        Memory chips come in powers of two: drivers report 79.6 GiB of an "80 GB" H100. Error
        correction takes up to 6 % on cards with GDDR6 (L4, L40S), which is not subtracted."""
        return self.memory_gb * 2**30


class KnownDevice(DeviceSpec):
    """A row of the device table."""

    match: list[str] = Field(min_length=1)  # patterns for the whole driver name, see `normalize`
    library: bool = Field(description="Whether the library holds trees computed for it.")
    host_link: LinkName | None = None
    """Link to the host's memory; none: boards differ. Slower or shared slots have less."""
    has_bfloat16: bool = True

    def spec(self) -> DeviceSpec:
        """Only the datasheet values."""
        return DeviceSpec(
            **self.model_dump(exclude={"match", "library", "host_link", "has_bfloat16"})
        )


@dataclass(frozen=True)
class Device:
    """What is known about the device with a given driver name."""

    name: str
    id: str | None  # our id; None when the name is not in the table
    spec: DeviceSpec | None
    """Datasheet values (of the slice, for a MIG slice); None for CPUs and unknown devices."""
    mig: str | None = None  # the MIG profile ("3g.40gb"), if it is a slice

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16; devices that are not in the table count as if."""
        row = known_devices().get(self.id or "")
        return row is None or row.has_bfloat16


@cache
def known_devices() -> dict[str, KnownDevice]:
    """The device table, by id."""
    table = read_json(_FILE, "device", DeviceError)["devices"]
    return {device["id"]: KnownDevice.model_validate(device) for device in table}


def names_near(name: str) -> list[str]:
    """Ids of devices that a name without an exact match may mean, at most three; may be empty."""
    words = normalize(name).replace(" ", "-")
    within = [known for known in known_devices() if words and words in known]
    return within[:3] or difflib.get_close_matches(words, known_devices(), n=1)


def normalize(name: str) -> str:
    """Lower case, words only, without maker and brand: "a100 sxm4 80gb"."""
    words = re.split(r"[^a-z0-9.]+", name.lower().replace("(r)", " ").replace("(tm)", " "))
    dropped = {"", "nvidia", "amd", "instinct", "geforce", "tesla", "radeon", "graphics"}
    return " ".join(word for word in words if word not in dropped)


def identify(name: str) -> Device:
    """The device of a name.

    Args:
        name: The driver's: CUDA's or ROCm's ("NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X"), a
            MIG slice's ("NVIDIA A100-SXM4-80GB MIG 3g.40gb"), or a CPU's model name from
            /proc/cpuinfo. Or vLLM's "cpu", or an id of the device table.

    Raises:
        DeviceError: The name is empty.
    """
    if not name.strip():
        raise DeviceError(
            "the device name is empty: give the name the driver reports "
            '("NVIDIA H200"; for a CPU its model name, or "cpu")'
        )
    part = re.search(r"\bMIG\s+(\d)g\.(\d+)gb\S*", name, flags=re.IGNORECASE)
    words = normalize(name[: part.start()] if part else name)
    for device in known_devices().values():
        if words == device.id.replace("-", " ") or any(
            re.fullmatch(pattern, words) for pattern in device.match
        ):
            if part is None:
                return Device(name, device.id, device.spec())
            gpus, gigabytes = int(part[1]), int(part[2])
            mig = f"{gpus}g.{gigabytes}gb"
            return Device(name, device.id, _slice(device.spec(), gpus, gigabytes, mig), mig)
    return Device(name, X86_CPU if _is_x86_cpu(words) else None, None)


def current_cpu_name() -> str:
    """The model name of this machine's CPU; if it has none, "cpu" on x86, else the architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", text, flags=re.MULTILINE)
    if found:
        return found[1].strip()
    machine = platform.machine().lower()
    return platform.processor() or ("cpu" if machine in ("x86_64", "amd64") else machine or "cpu")


def this_device_name() -> str:
    """The driver's name of this machine's first GPU, else its CPU's name."""
    name = current_cpu_name()
    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
        name = found.stdout.partition("\n")[0].strip() or name
    return name


def nearest(spec: DeviceSpec | None, candidates: Mapping[str, DeviceSpec]) -> tuple[str, str]:
    """The candidate most like a device by operations per byte and bandwidth, as ratios; and why.
    A device that is not known gets the one with the fewest operations per byte: the smallest,
    safest trees."""
    if spec is None:
        cautious = min(candidates, key=lambda id_: (candidates[id_].ridge, id_))
        return cautious, (
            f"nothing but its name is known, so the most cautious trees, those of {cautious}, "
            "are used"
        )

    def distance(id_: str) -> tuple[float, str]:
        other = candidates[id_]
        ratios = spec.ridge / other.ridge, spec.bandwidth_gb_s / other.bandwidth_gb_s
        return math.hypot(*map(math.log, ratios)), id_

    best = min(candidates, key=distance)
    other = candidates[best]
    return best, (
        f"{best} is the nearest by roofline ({spec.ridge:.4g} against {other.ridge:.4g} operations "
        f"per byte, {spec.bandwidth_gb_s:.4g} against {other.bandwidth_gb_s:.4g} GB/s)"
    )


def _slice(spec: DeviceSpec, gpus: int, memory_gb: int, mig: str) -> DeviceSpec:
    """A MIG slice has g of 7 compute slices and its share of 8 memory slices."""
    eighths = min(8, max(1, round(8 * memory_gb / spec.memory_gb)))
    return spec.model_copy(
        update={
            "name": f"{spec.name} MIG {mig}",
            "memory_gb": float(memory_gb),
            "bandwidth_gb_s": spec.bandwidth_gb_s * eighths / 8,
            "bf16_tflops": spec.bf16_tflops * min(gpus, 7) / 7,
            "note": f"{min(gpus, 7)}/7 of the compute and {eighths}/8 of the memory slices",
        }
    )


def _is_x86_cpu(words: str) -> bool:
    if words in ("cpu", "x86 cpu"):
        return True
    brands = (
        r"\b(xeon|epyc|ryzen|threadripper|athlon|opteron|core|pentium|celeron|atom|"
        r"qemu virtual|kvm|intel .*(cpu|processor))\b"
    )
    return bool(re.search(brands, words)) and "gpu" not in words.split()
