"""A profile for a device nobody measured, from its datasheet (paper, section 4.1).

Each forward pass is the sum of its matrix products, its attention, its kernel
launches and, on several devices, its reductions; products and attention take
the longer of moving their bytes and doing their arithmetic. Decoding is bound
by bytes, so that scoring a tree costs little more than one token until the
device's operations per byte are used up: what Sequoia lives on.

What no datasheet says is in `Assumptions` and is copied into the profile.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from sequoia_vllm.hardware.device import DeviceSpec
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.profile import Curve, Overhead, Profile
from sequoia_vllm.tree.json_file import FileModel

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BYTES_PER_VALUE = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}


class Assumptions(FileModel):
    """What a datasheet does not say. Chosen, not measured."""

    bandwidth_efficiency: float = Field(
        default=0.85, gt=0, le=1, description="Achieved share of the memory bandwidth."
    )
    compute_efficiency: float = Field(
        default=0.65, gt=0, le=1, description="Achieved share of the dense matrix rate."
    )
    layer_seconds: float = Field(
        default=25e-6, ge=0, description="Launches and small kernels of one layer, CUDA graphs on."
    )
    forward_seconds: float = Field(
        default=60e-6, ge=0, description="The same outside the layers, sampling included."
    )
    plain_step_seconds: float = Field(
        default=300e-6, ge=0, description="A plain step outside the forward pass."
    )
    tree_step_seconds: float = Field(
        default=600e-6, ge=0, description="A speculative step outside the forward passes."
    )
    logits_passes: float = Field(
        default=6.0, ge=0, description="Times the float32 logits of a node are read or written."
    )
    reduction_seconds: float = Field(
        default=10e-6, ge=0, description="Start of one reduction between devices."
    )


def roofline_profile(
    device: DeviceSpec,
    target: ModelShape,
    draft: ModelShape,
    dtype: str = "bfloat16",
    tensor_parallel_size: int = 1,
    context_length: int = 1024,
    assumptions: Assumptions | None = None,
    tokens: Sequence[int] = TOKENS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> Profile:
    """The profile that datasheet values predict.

    Args:
        device: Datasheet values.
        target: Shape of the target, split over ``tensor_parallel_size`` devices.
        draft: Shape of the draft, split the same way (as vLLM requires).
        dtype: Weight and KV cache type; a key of `BYTES_PER_VALUE`.
        tensor_parallel_size: Devices.
        context_length: Committed tokens of each request.
        assumptions: What the datasheet does not say; None: the defaults.
        tokens: Tokens per request to compute times for, increasing, from 1.
        batch_sizes: Batch sizes to compute times for.

    Raises:
        ValueError: If ``dtype`` is not known.
    """
    if dtype not in BYTES_PER_VALUE:
        raise ValueError(f"dtype {dtype!r}: the roofline knows {', '.join(BYTES_PER_VALUE)}")
    assumptions = assumptions or Assumptions()
    forward = _Forward(device, BYTES_PER_VALUE[dtype], tensor_parallel_size, assumptions)

    def curves(shape: ModelShape) -> list[Curve]:
        return [
            Curve(
                batch_size=batch,
                context_length=context_length,
                tokens=list(tokens),
                seconds=[
                    _rounded(forward.seconds(shape, count, batch, context_length))
                    for count in tokens
                ],
            )
            for batch in batch_sizes
        ]

    return Profile(
        source="roofline",
        date=device.date,
        device=device.name,
        target=target.name,
        draft=draft.name,
        target_parameters=target.parameters,
        draft_parameters=draft.parameters,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        target_forward=curves(target),
        draft_level=curves(draft),
        overhead=[
            Overhead(
                batch_size=1,
                plain_seconds=assumptions.plain_step_seconds,
                tree_seconds=assumptions.tree_step_seconds,
            )
        ],
        datasheet=device,
        target_shape=target,
        draft_shape=draft,
        assumptions=assumptions.to_dict(),
    )


class _Forward:
    """Time of one forward pass."""

    def __init__(
        self, device: DeviceSpec, value_bytes: float, devices: int, assumed: Assumptions
    ) -> None:
        self._bytes_per_second = device.bandwidth_gb_s * 1e9 * assumed.bandwidth_efficiency
        self._operations_per_second = device.bf16_tflops * 1e12 * assumed.compute_efficiency
        self._link_bytes_per_second = device.interconnect_gb_s * 1e9
        self._value_bytes = value_bytes
        self._devices = devices
        self._assumed = assumed

    def seconds(self, shape: ModelShape, tokens: int, batch: int, context: int) -> float:
        """Time for ``tokens`` tokens of each of ``batch`` requests."""
        rows = tokens * batch
        products = self._longer(
            shape.matmul_parameters * self._value_bytes, 2 * shape.matmul_parameters * rows
        )
        attention = self._longer(
            batch * context * shape.kv_values_per_token * self._value_bytes,
            4 * shape.layers * shape.heads * shape.head_size * (context + tokens) * rows,
        )
        logits = self._longer(rows * shape.vocab * 4 * self._assumed.logits_passes, 0)
        launches = shape.layers * self._assumed.layer_seconds + self._assumed.forward_seconds
        return products + attention + logits + launches + self._reductions(shape, rows)

    def _longer(self, moved: float, operations: float) -> float:
        """Roofline of work that is split over all devices."""
        return (
            max(moved / self._bytes_per_second, operations / self._operations_per_second)
            / self._devices
        )

    def _reductions(self, shape: ModelShape, rows: int) -> float:
        """Two all-reduces of the residual stream per layer, as rings."""
        if self._devices == 1:
            return 0.0
        moved = 2 * (self._devices - 1) / self._devices * rows * shape.hidden * self._value_bytes
        once = self._assumed.reduction_seconds + moved / self._link_bytes_per_second
        return 2 * shape.layers * once


def _rounded(seconds: float) -> float:
    """Six digits: the same on every platform, and more than a model deserves."""
    return float(f"{seconds:.6g}")
