"""Whether a pair of models fits the memory of the devices it is split over."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sequoia_vllm.hardware.device import DeviceSpec
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.roofline import BYTES_PER_VALUE
from sequoia_vllm.hardware.streaming import StreamedWeights

# vLLM's default for `--gpu-memory-utilization`.
_UTILIZATION = 0.92
# Assumed for activations, CUDA graphs and the CUDA context of each device.
_RUNTIME_BYTES = 3 * 2**30


@dataclass(frozen=True)
class MemoryFit:
    """What of one device's memory is left for the KV cache.

    Attributes:
        weights_bytes: Its part of both models' weights, as far as they lie in it, and the
            buffers of those that do not.
        kv_bytes_per_token: Its part of the keys and values of a token, both models.
        kv_tokens: Tokens that the KV cache can hold in what vLLM takes by default.
    """

    memory_bytes: float
    weights_bytes: float
    kv_bytes_per_token: float
    kv_tokens: int

    @property
    def weights_share(self) -> float:
        """Share of the memory that weights take; more than 1: they do not fit."""
        return self.weights_bytes / self.memory_bytes

    def problem(self, tokens: int = 1) -> str | None:
        """Why ``tokens`` tokens in all (those of every request) do not fit; None: they do."""
        if self.weights_share > 1:
            return "does not fit"
        if self.kv_tokens == 0:
            return "no room for a KV cache"
        if self.kv_tokens < tokens:
            return f"KV cache for {self.kv_tokens} tokens only"
        return None


def memory_fit(
    device: DeviceSpec, target: ModelShape, draft: ModelShape, dtype: str = "bfloat16",
    tensor_parallel_size: int = 1, streamed: StreamedWeights | None = None,
) -> MemoryFit:  # fmt: skip
    """How a pair fits when both models are split over this many devices."""
    value_bytes = BYTES_PER_VALUE[dtype]
    pair = target, draft
    weights = sum(shape.weights_bytes(value_bytes) for shape in pair) / tensor_parallel_size
    if streamed is not None:
        weights += streamed.buffer_bytes - streamed.bytes_per_pass
    kv_values = sum(
        shape.kv_values_per_token * shape.kv_copies(tensor_parallel_size) for shape in pair
    )
    per_token = kv_values * value_bytes / tensor_parallel_size
    left = _UTILIZATION * device.memory_bytes - _RUNTIME_BYTES - weights
    return MemoryFit(device.memory_bytes, weights, per_token, max(0, math.floor(left / per_token)))
