"""Predicted times of a step: their options, and the roofline's profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from sequoia_vllm.cli.common import fail
from sequoia_vllm.hardware.device import (
    DeviceError,
    DeviceSpec,
    InterconnectKind,
    identify,
    known_devices,
)
from sequoia_vllm.hardware.models import ModelClass, ModelShape, every_class
from sequoia_vllm.hardware.offloading import OffloadBackend, host_link, streamed_layers
from sequoia_vllm.hardware.roofline import bytes_per_value, roofline_profile
from sequoia_vllm.hardware.step_profile import Profile, ProfileError
from sequoia_vllm.hardware.streaming import LINKS, LinkName, StreamedWeights

RateOption = Annotated[
    float | None,
    typer.Option(
        "--interconnect-gb-s",
        help="Rate between devices in one direction, 10^9 bytes/s, where it is not the "
        "datasheet's: PCIe 5.0 x16 has 64, NVLink 4 has 450 (printed as 900, both directions).",
    ),
]
KindOption = Annotated[
    InterconnectKind | None,
    typer.Option(
        "--interconnect-kind",
        help="How links lead to the other devices, where not as in the datasheet. switch: full "
        "rate to any; mesh: a share to each of seven; bus: PCIe; host: PCIe of GPUs that cannot "
        "read each other's memory.",
    ),
]
OffloadOption = Annotated[
    float | None,
    typer.Option(
        "--offload-gb",
        help="GiB of the target's layers on each device that lie in the host's memory, counted as "
        "by vLLM's --cpu-offload-gb; more than there are: all.",
    ),
]
LinkOption = Annotated[
    LinkName | None,
    typer.Option("--link", help="What they are read over; default: the device's own link."),
]
BackendOption = Annotated[
    OffloadBackend,
    typer.Option(
        "--offload-backend",
        help="prefetch: layers are copied while others compute; uva: products read weights over "
        "the link, once for each 128 rows.",
    ),
]


@dataclass(frozen=True)
class Offload:
    """How much to offload, and over which link, on any device.

    Attributes:
        gib: GiB of the target's layers on each device, as vLLM's ``--cpu-offload-gb`` counts;
            more than there are: all.
        backend: See `sequoia_vllm.hardware.offloading`.
        link: By name; None: the device's own.
    """

    gib: float
    backend: OffloadBackend = "prefetch"
    link: LinkName | None = None

    def streamed(
        self, target: ModelShape, device: str, value_bytes: float, devices: int
    ) -> StreamedWeights:
        """The streamed weights of a target on such devices; raises like `streamed_layers`."""
        name, words = host_link(device)
        if self.link is not None:
            name, words = self.link, LINKS[self.link].name
        return streamed_layers(
            target, self.gib * 2**30, LINKS[name].bytes_per_second, words,
            value_bytes=value_bytes, devices=devices, backend=self.backend,
        )  # fmt: skip


def with_interconnect(
    device: DeviceSpec, gb_s: float | None = None, kind: InterconnectKind | None = None
) -> DeviceSpec:
    """The same device in a box with other links.

    Args:
        gb_s: Rate of its links in one direction, 10^9 bytes/s; None: the datasheet's.
        kind: How they lead to the other devices; None: as the datasheet says.
    """
    if gb_s is None and kind is None:
        return device
    if gb_s is not None and not 0 < gb_s <= 1e6:
        raise DeviceError(
            f"interconnect of {gb_s:g} GB/s: give the rate in one direction, in 10^9 bytes/s "
            "(PCIe 5.0 x16: 64; NVLink 4: 450, half of the printed 900)"
        )
    rate, kind = gb_s or device.interconnect_gb_s, kind or device.interconnect_kind
    return device.model_copy(
        update={
            "interconnect": f"given: {kind}, {rate:g} GB/s in one direction",
            "interconnect_kind": kind,
            "interconnect_gb_s": rate,
        }
    )


def offload_of(gib: float | None, link: LinkName | None, backend: OffloadBackend) -> Offload | None:
    """Returns what the options say is offloaded; fails where they do not fit together."""
    if gib is None:
        if link is not None or backend != "prefetch":
            fail("--link and --offload-backend are of offloading: give --offload-gb")
        return None
    return Offload(gib, backend, link)


def device_of(
    name: str,
    interconnect_gb_s: float | None = None,
    interconnect_kind: InterconnectKind | None = None,
    tensor_parallel_size: int = 1,
) -> DeviceSpec:
    """Returns the device of this name, with other links if they are given."""
    device = identify(name)
    if device.spec is None:
        raise DeviceError(
            f"no datasheet values for {name!r}; there are for {', '.join(known_devices())}"
        )
    if device.mig is not None and tensor_parallel_size > 1:
        raise DeviceError(
            f"{name!r} is a MIG slice, and slices have no link to each other: use tensor parallel "
            "size 1, or the whole device"
        )
    return with_interconnect(device.spec, interconnect_gb_s, interconnect_kind)


def class_of(name: str) -> ModelClass:
    """Returns the model class of this name."""
    classes = every_class()
    if name not in classes:
        raise ProfileError(f"no model class {name!r}; there are {', '.join(classes)}")
    return classes[name]


def predict(
    device: DeviceSpec, pair: ModelClass, tensor_parallel_size: int = 1, dtype: str = "bfloat16",
    context_length: int = 1024, offload: Offload | None = None,
) -> Profile:  # fmt: skip
    """Predicts the profile of a device and a model class by the roofline."""
    if context_length < 1:
        raise ProfileError(f"context length {context_length}: must be at least 1")
    try:
        streamed = None
        if offload is not None:
            streamed = offload.streamed(
                pair.target, device.id, bytes_per_value(dtype), tensor_parallel_size
            )
        return roofline_profile(
            device, pair.target, pair.draft, dtype, tensor_parallel_size, context_length,
            streamed=streamed,
        )  # fmt: skip
    except ProfileError:
        raise
    except ValueError as error:
        raise ProfileError(str(error)) from error
