"""A profile for a device nobody measured, from its datasheet (paper, section 4.1).

Each forward pass is the sum of its matrix products, its attention, its kernel
launches, its logits and, on several devices, its reductions; products and
attention take the longer of moving their bytes and doing their arithmetic.
Decoding is bound by bytes, so that scoring a tree costs little more than one
token until the device's operations per byte are used up: what Sequoia lives on.

More devices divide products and attention. They do not divide launches and
logits, and add reductions, whose bytes grow with the tokens and whose number
with the layers. The draft is split like the target, as vLLM requires: its
products shrink too, its launches and reductions do not, so that a draft level
becomes dearer beside the target and the best trees shallower.

What no datasheet says is in `Assumptions` and is copied into the profile.
Whether the models fit the memory is another question: `memory_fit`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sequoia_vllm.hardware.assumptions import Assumptions
from sequoia_vllm.hardware.device import DeviceSpec
from sequoia_vllm.hardware.interconnect import Interconnect
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.step_profile import Curve, Overhead, Profile

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# The paper's largest tree on one GPU: larger ones rest on a measured profile.
ROOFLINE_MAX_SIZE = 128
BYTES_PER_VALUE = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}


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
        dtype: Weight and KV cache type; a key of `BYTES_PER_VALUE`. Shapes may say that their
            layers' weights are smaller.
        tensor_parallel_size: Devices.
        context_length: Committed tokens of each request.
        assumptions: What the datasheet does not say; None: the defaults.
        tokens: Tokens per request to compute times for, increasing, from 1.
        batch_sizes: Batch sizes to compute times for.

    Raises:
        ValueError: If ``dtype`` is not known, or a model cannot be split over so many devices.
    """
    value_bytes = bytes_per_value(dtype)
    for shape in (target, draft):
        shape.check_split(tensor_parallel_size)
    assumptions = assumptions or Assumptions()
    forward = _Forward(device, value_bytes, tensor_parallel_size, assumptions)

    def curves(shape: ModelShape, kernels: float = 0) -> list[Curve]:
        return [
            Curve(
                batch_size=batch,
                context_length=context_length,
                tokens=list(tokens),
                seconds=[
                    _rounded(
                        forward.seconds(shape, count, batch, context_length)
                        + kernels * assumptions.small_kernel_seconds
                    )
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
        draft_level=curves(draft, assumptions.level_kernels),
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


def bytes_per_value(dtype: str) -> float:
    """Bytes of a weight or key of this type.

    Raises:
        ValueError: If it is not known; lists those that are.
    """
    if dtype not in BYTES_PER_VALUE:
        raise ValueError(f"dtype {dtype!r}: known are {', '.join(BYTES_PER_VALUE)}")
    return BYTES_PER_VALUE[dtype]


class _Forward:
    """Time of one forward pass."""

    def __init__(
        self, device: DeviceSpec, value_bytes: float, devices: int, assumed: Assumptions
    ) -> None:
        self._bytes_per_second = device.bandwidth_gb_s * 1e9 * assumed.bandwidth_efficiency
        self._operations_per_second = device.bf16_tflops * 1e12 * assumed.compute_efficiency
        self._value_bytes = value_bytes
        # Quantized weights leave what is computed with them in half precision.
        self._activation_bytes = max(2.0, value_bytes)
        self._devices = devices
        self._links = Interconnect(device, devices, assumed)
        self._assumed = assumed

    def seconds(self, shape: ModelShape, tokens: int, batch: int, context: int) -> float:
        """Time for ``tokens`` tokens of each of ``batch`` requests."""
        rows = tokens * batch
        products = self._longer(
            shape.matmul_bytes(self._value_bytes), 2 * shape.matmul_parameters * rows
        )
        kv_bytes = batch * context * shape.kv_values_per_token * self._value_bytes
        attention = self._longer(
            kv_bytes * shape.kv_copies(self._devices),
            4 * shape.layers * shape.heads * shape.head_size * (context + tokens) * rows,
        )
        launches = shape.layers * self._assumed.layer_seconds + self._assumed.forward_seconds
        launches += self._merges(shape, tokens, batch)
        return products + attention + launches + self._logits(shape, rows) + self._sums(shape, rows)

    def _merges(self, shape: ModelShape, tokens: int, batch: int) -> float:
        """Of tree attention's splits; plain decoding's are in its launches."""
        key_heads = shape.kv_heads * shape.kv_copies(self._devices) / self._devices
        if tokens == 1 or batch * key_heads >= self._assumed.split_below:
            return 0.0
        return shape.layers * self._assumed.small_kernel_seconds

    def _longer(self, moved: float, operations: float) -> float:
        """Roofline of work that is split over all devices."""
        return (
            max(moved / self._bytes_per_second, operations / self._operations_per_second)
            / self._devices
        )

    def _logits(self, shape: ModelShape, rows: int) -> float:
        """Collecting the vocabulary's parts, then what each device does with all of it.

        vLLM gathers in the model's type and samples on every device, so that more
        devices make nothing of this cheaper.
        """
        read = rows * shape.vocab * 4 * self._assumed.logits_passes / self._bytes_per_second
        return self._links.all_gather(rows * shape.vocab * self._activation_bytes) + read

    def _sums(self, shape: ModelShape, rows: int) -> float:
        """Of the residual stream: after attention, after the MLP, and after the embedding."""
        return (2 * shape.layers + 1) * self._links.all_reduce(
            rows * shape.hidden * self._activation_bytes
        )


def _rounded(seconds: float) -> float:
    """Six digits: the same on every platform, and more than a model deserves."""
    return float(f"{seconds:.6g}")
