"""Predicts what more devices do for a pair: the fastest tree at each number of devices.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --interconnect-gb-s 64 --interconnect-kind bus

Nothing is measured: the roofline predicts every time, in bfloat16, at contexts of 1,024 tokens.
"""

import math
from typing import Annotated

import typer

from benchmarks import markdown_table
from sequoia_vllm.cli.common import friendly_errors
from sequoia_vllm.cli.measuring import numbers
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import (
    LINKS,
    DeviceError,
    DeviceSpec,
    InterconnectKind,
    LinkName,
    identify,
)
from sequoia_vllm.hardware.models import ModelShape, every_class
from sequoia_vllm.hardware.roofline import largest_tree, roofline_profile
from sequoia_vllm.hardware.streaming import (
    OffloadBackend,
    StreamedWeights,
    host_link,
    streamed_layers,
)
from sequoia_vllm.library.tree_library import find_vector

_COLUMNS = (
    "device", "TP", "batch", "plain, ms", "draft level, ms", "nodes", "depth", "tokens per step",
    "speedup",
)  # fmt: skip
_CONTEXT = 1024
_VALUE_BYTES = 2
# vLLM's default for `--gpu-memory-utilization`.
_UTILIZATION = 0.92
# Assumed for activations, CUDA graphs and the CUDA context of each device.
_RUNTIME_BYTES = 3 * 2**30


def scaling(
    model_class: Annotated[
        str, typer.Option("--class", help="Model class: <target size>-<draft size>.")
    ] = "70b-1b",
    devices: Annotated[
        str, typer.Option(help="Comma-separated driver names or ids.")
    ] = "h100-sxm,h200",
    tensor_parallel_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,4,8",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated requests in a step.")] = "1,16",
    acceptance: Annotated[
        str, typer.Option(help="Vector: a file, or the name of one of the library.")
    ] = "shipped",
    interconnect_gb_s: Annotated[
        float | None,
        typer.Option(
            help="Rate between devices in one direction, 10^9 bytes/s, where it is not the "
            "datasheet's: PCIe 5.0 x16 has 64, NVLink 4 has 450 (printed as 900)."
        ),
    ] = None,
    interconnect_kind: Annotated[
        InterconnectKind | None, typer.Option(help="How links lead to the other devices.")
    ] = None,
    offload_gb: Annotated[
        float | None,
        typer.Option(
            help="GiB of the target's layers on each device that lie in the host's memory, "
            "counted as by vLLM's --cpu-offload-gb; more than there are: all."
        ),
    ] = None,
    link: Annotated[
        LinkName | None, typer.Option(help="What they are read over; default: the device's own.")
    ] = None,
    offload_backend: Annotated[OffloadBackend, typer.Option()] = "prefetch",
) -> None:
    """Predict what more devices do for a pair, as a Markdown table."""
    with friendly_errors():
        pair, vector = every_class()[model_class], find_vector(acceptance)
        batches = numbers("--batch-sizes", batch_sizes)
        rows = []
        for name in devices.split(","):
            if (spec := identify(name.strip()).spec) is None:
                raise DeviceError(f"no datasheet values for {name!r}")
            device = with_interconnect(spec, interconnect_gb_s, interconnect_kind)
            for size in numbers("--tensor-parallel-sizes", tensor_parallel_sizes):
                streamed = None
                if offload_gb is not None:
                    way = LINKS[link] if link else host_link(device.id)
                    streamed = streamed_layers(
                        pair.target, offload_gb * 2**30, way.bytes_per_second, way.name,
                        devices=size, backend=offload_backend,
                    )  # fmt: skip
                models = pair.target, pair.draft
                profile = roofline_profile(
                    device, *models, "bfloat16", size, _CONTEXT, streamed=streamed
                )
                most, cost = largest_tree(profile), CostModel(profile)
                tokens = batches[-1] * (_CONTEXT + most)
                if problem := memory_problem(device, *models, tokens, size, streamed):
                    rows.append((device.id, str(size), "", problem, *[""] * 5))
                    continue
                for batch in batches:
                    tree = choose_tree(vector, profile, batch, most)
                    estimate = cost.estimate(tree, vector, batch)
                    rows.append((
                        device.id, str(size), str(batch), f"{1e3 * cost.plain_seconds(batch):.1f}",
                        f"{1e3 * float(cost.draft_seconds(1, batch)):.2f}", str(tree.size),
                        str(tree.depth), f"{estimate.expected_tokens:.2f}",
                        f"{estimate.speedup:.2f}x",
                    ))  # fmt: skip
        typer.echo(markdown_table(_COLUMNS, rows))


def with_interconnect(
    device: DeviceSpec, gb_s: float | None = None, kind: InterconnectKind | None = None
) -> DeviceSpec:
    """The same device in a box with other links; None: as in the datasheet."""
    links = {"interconnect_gb_s": gb_s, "interconnect_kind": kind}
    return device.model_copy(update={name: value for name, value in links.items() if value})


def weights_bytes(
    target: ModelShape, draft: ModelShape, devices: int = 1, streamed: StreamedWeights | None = None
) -> float:
    """Bytes of both models' weights in the memory of one of ``devices``.

    Args:
        streamed: Weights of the target that are read from elsewhere: only their buffers count here.
            None: there are none.
    """
    weights = sum(shape.weights_bytes(_VALUE_BYTES) for shape in (target, draft)) / devices
    return weights + (streamed.buffer_bytes - streamed.bytes_per_pass if streamed else 0)


def memory_problem(
    device: DeviceSpec, target: ModelShape, draft: ModelShape, tokens: int, devices: int = 1,
    streamed: StreamedWeights | None = None,
) -> str | None:  # fmt: skip
    """Why ``tokens`` tokens of all requests do not fit so many devices; None: they do."""
    weights = weights_bytes(target, draft, devices, streamed)
    if weights > device.memory_bytes:
        return "does not fit"
    values = sum(each.kv_values_per_token * each.kv_copies(devices) for each in (target, draft))
    left = _UTILIZATION * device.memory_bytes - _RUNTIME_BYTES - weights
    room = max(0, math.floor(left * devices / (values * _VALUE_BYTES)))
    if room < tokens:
        return f"KV cache for {room} tokens only" if room else "no room for a KV cache"
    return None


if __name__ == "__main__":
    typer.run(scaling)
