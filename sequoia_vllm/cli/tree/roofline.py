"""``sequoia-vllm tree roofline``: a predicted profile, and how it looks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.table import Table

from sequoia_vllm.hardware import (
    CostModel,
    DeviceError,
    DeviceSpec,
    MemoryFit,
    Profile,
    identify,
    memory_fit,
    roofline_profile,
)
from sequoia_vllm.hardware.device import InterconnectKind, known_devices
from sequoia_vllm.hardware.memory import fewest_devices, more_to_offload
from sequoia_vllm.hardware.models import ModelClass, ModelShape, every_class
from sequoia_vllm.hardware.offloading import Offload
from sequoia_vllm.hardware.roofline import bytes_per_value
from sequoia_vllm.hardware.step_profile import ProfileError

ClassOption = Annotated[
    str, typer.Option("--class", help="Model class: <target size>-<draft size>.")
]
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
        help="How links lead to the other devices, where it is not as in the datasheet: switch "
        "(full rate to any), mesh (a share to each of seven), bus (PCIe), host (PCIe of GPUs that "
        "cannot read each other's memory).",
    ),
]
ContextOption = Annotated[int, typer.Option(help="Committed tokens per request.")]
DtypeOption = Annotated[str, typer.Option(help="Weight and KV cache type.")]


def device_of(
    name: str,
    interconnect_gb_s: float | None = None,
    interconnect_kind: InterconnectKind | None = None,
    tensor_parallel_size: int = 1,
) -> DeviceSpec:
    """The device of this name, with other links if they are given.

    Raises:
        DeviceError: If the device has no datasheet values here, is a MIG slice (which
            reach no other one) split over several, or the rate is wrong.
    """
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
    return device.spec.with_interconnect(interconnect_gb_s, interconnect_kind)


def class_of(name: str) -> ModelClass:
    """The model class of this name.

    Raises:
        ProfileError: If there is none.
    """
    classes = every_class()
    if name not in classes:
        raise ProfileError(f"no model class {name!r}; there are {', '.join(classes)}")
    return classes[name]


@contextmanager
def profile_errors(context_length: int) -> Iterator[None]:
    """What is wrong with the numbers of a prediction, as `ProfileError`."""
    if context_length < 1:
        raise ProfileError(f"context length {context_length}: must be at least 1")
    try:
        yield
    except ProfileError:
        raise
    except ValueError as error:
        raise ProfileError(str(error)) from error


def predict(
    device: DeviceSpec,
    class_name: str,
    tensor_parallel_size: int = 1,
    dtype: str = "bfloat16",
    context_length: int = 1024,
    offload: Offload | None = None,
) -> Profile:
    """The roofline profile of a device and a model class.

    Raises:
        ProfileError: If the class, dtype or a number is wrong, or the draft does not fit beside
            what is streamed of the target.
    """
    pair = class_of(class_name)
    with profile_errors(context_length):
        streamed = None
        if offload is not None:
            streamed = offload.streamed(
                pair.target, device.id, bytes_per_value(dtype), tensor_parallel_size
            )
        return roofline_profile(
            device, pair.target, pair.draft, dtype, tensor_parallel_size, context_length,
            streamed=streamed,
        )  # fmt: skip


def fit_of(profile: Profile) -> MemoryFit | None:
    """How the pair of a predicted profile fits its devices; None: a measured one did."""
    pair = _predicted_pair(profile)
    size = profile.tensor_parallel_size
    return pair and memory_fit(*pair, profile.dtype, size, profile.streamed)


def memory_problem(profile: Profile, tokens: int) -> str | None:
    """That the pair and ``tokens`` tokens in all do not fit, and what would; None: they do."""
    pair, fit = _predicted_pair(profile), fit_of(profile)
    if pair is None or fit is None or (problem := fit.problem(tokens)) is None:
        return None
    fix = _offload_more(profile, fit, tokens) or _more_devices(pair, profile.dtype, tokens)
    return (
        f"{problem}: {fit.weights_bytes / 2**30:.1f} GiB of weights on each device of "
        f"{fit.memory_bytes / 2**30:.0f} GiB; the times are of devices that had the memory ({fix})"
    )


def _offload_more(profile: Profile, fit: MemoryFit, tokens: int) -> str | None:
    """How much would do, where weights are streamed and there are so many."""
    streamed, target = profile.streamed, profile.target_shape
    if streamed is None or target is None:
        return None
    layers = target.layers_bytes(bytes_per_value(profile.dtype)) / profile.tensor_parallel_size
    enough = math.ceil((streamed.bytes_per_pass + more_to_offload(fit, tokens)) / 2**30)
    return f"use --offload-gb {enough}" if enough * 2**30 <= layers else None


def _more_devices(pair: tuple[DeviceSpec, ModelShape, ModelShape], dtype: str, tokens: int) -> str:
    """How many would do."""
    enough = fewest_devices(*pair, dtype, tokens)
    if enough is not None:
        return f"use --tensor-parallel-size {enough}"
    return "no size up to 16 would do: use a smaller dtype, fewer requests or a shorter context"


def _predicted_pair(profile: Profile) -> tuple[DeviceSpec, ModelShape, ModelShape] | None:
    """What a predicted profile carries; None: it was measured."""
    device, target, draft = profile.datasheet, profile.target_shape, profile.draft_shape
    if profile.source != "roofline" or device is None or target is None or draft is None:
        return None
    return device, target, draft


def times_json(profile: Profile) -> dict[str, Any]:
    """What a prediction rests on."""
    data: dict[str, Any] = {
        "source": profile.source,
        "device": profile.device,
        "target": profile.target,
        "draft": profile.draft,
        "tensor_parallel_size": profile.tensor_parallel_size,
    }
    if profile.datasheet is not None and (fit := fit_of(profile)) is not None:
        data["interconnect_gb_s"] = profile.datasheet.interconnect_gb_s
        data["interconnect_kind"] = profile.datasheet.interconnect_kind
        data["memory"] = fit.to_dict()
    if profile.streamed is not None:
        data["streamed"] = profile.streamed.to_dict()
    return data


def times_table(profile: Profile) -> Table:
    """Times by tokens per request, for a few batch sizes."""
    cost = CostModel(profile)
    batches = (1, 8, 64)
    reads = profile.draft_reading is not None
    parts = "target / first draft pass / draft level" if reads else "target / draft level"
    table = Table(
        title=f"{profile.device}: {profile.target} with {profile.draft}, TP "
        f"{profile.tensor_parallel_size} ({profile.source}; {parts}, ms)",
        box=None, pad_edge=False, header_style="bold", title_justify="left",
    )  # fmt: skip
    table.add_column("tokens", justify="right")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
    wide = (256, 512, 768) if profile.streamed else ()
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, *wide):
        table.add_row(str(tokens), *(_times(cost, tokens, batch, reads) for batch in batches))
    return table


def _times(cost: CostModel, tokens: int, batch: int, reads: bool) -> str:
    """Of passes over so many tokens of each request; the draft's first one if it is another."""
    # So many positions are those of a tree of one level less.
    first = cost.first_draft_seconds(tokens, tokens - 1, batch)
    level = cost.draft_seconds(tokens, batch)
    shown = (cost.target_seconds(tokens, batch), *((first,) if reads else ()), level)
    return " / ".join(f"{1e3 * float(seconds):.2f}" for seconds in shown)
