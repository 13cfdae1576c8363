"""What more devices would do for a pair, by the roofline: predicted, not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel, check_batch_sizes
from sequoia_vllm.hardware.device import DeviceSpec
from sequoia_vllm.hardware.memory import MemoryFit, memory_fit
from sequoia_vllm.hardware.models import ModelClass
from sequoia_vllm.hardware.offloading import Offload
from sequoia_vllm.hardware.roofline import bytes_per_value, largest_tree, roofline_profile
from sequoia_vllm.hardware.streaming import StreamedWeights
from sequoia_vllm.tree.acceptance import Acceptance


@dataclass(frozen=True)
class Prediction:
    """The fastest tree at one batch size.

    Attributes:
        batch_size: Requests in a step.
        plain_seconds: A plain step: the time per token of each request.
        draft_level_seconds: A draft pass over one node of each request; of a head that drafts all
            levels in one pass, drawing one level.
        size: Nodes of the tree, root included; 1: plain decoding is faster.
        depth: Its edges from the root to the deepest leaf.
        expected_tokens: Per request and step.
        seconds_per_token: Of each request, with this tree.
        speedup: Against plain decoding on the same devices.
    """

    batch_size: int
    plain_seconds: float
    draft_level_seconds: float
    size: int
    depth: int
    expected_tokens: float
    seconds_per_token: float
    speedup: float


@dataclass(frozen=True)
class ScalingRow:
    """One device type and tensor parallel size.

    Attributes:
        device: The device.
        tensor_parallel_size: Devices.
        memory: How the pair fits.
        problem: Why it cannot be served so; None: it can.
        predictions: By batch size; none where there is a problem.
        streamed: Weights of the target that are not in the devices' memory; None: all are.
    """

    device: DeviceSpec
    tensor_parallel_size: int
    memory: MemoryFit
    problem: str | None
    predictions: list[Prediction]
    streamed: StreamedWeights | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "device": self.device.id,
            "tensor_parallel_size": self.tensor_parallel_size,
            "interconnect_gb_s": self.device.interconnect_gb_s,
            "interconnect_kind": self.device.interconnect_kind,
            "problem": self.problem,
            "memory": self.memory.to_dict(),
            "streamed": self.streamed.to_dict() if self.streamed else None,
            "predictions": [asdict(prediction) for prediction in self.predictions],
        }


def scaling(
    devices: Sequence[DeviceSpec],
    model_class: ModelClass,
    acceptance: Acceptance,
    tensor_parallel_sizes: Sequence[int] = (1, 2, 4, 8),
    batch_sizes: Sequence[int] = (1, 16),
    dtype: str = "bfloat16",
    context_length: int = 1024,
    offload: Offload | None = None,
) -> list[ScalingRow]:
    """The fastest tree of each device type, tensor parallel size and batch size.

    Args:
        devices: Datasheet values.
        model_class: Target and draft, both split over the devices.
        acceptance: p[k] or p[d][k] of the pair.
        tensor_parallel_sizes: Devices.
        batch_sizes: Requests in a step; all must fit the memory with their context and trees.
        dtype: Weight and KV cache type.
        context_length: Committed tokens of each request.
        offload: What of the target is not in the devices' memory; None: nothing.

    Returns:
        Rows by device, then by tensor parallel size, in the given order.

    Raises:
        ProfileError: If there are no batch sizes, or one is below 1.
        ValueError: If ``dtype`` is not known or a model cannot be split so.
    """
    batches = check_batch_sizes(list(batch_sizes))
    pair = model_class.target, model_class.draft
    rows = []
    for device in devices:
        for size in tensor_parallel_sizes:
            streamed = None
            if offload is not None:
                streamed = offload.streamed(
                    model_class.target, device.id, bytes_per_value(dtype), size
                )
            profile = roofline_profile(
                device, *pair, dtype, size, context_length, streamed=streamed
            )
            memory = memory_fit(device, *pair, dtype, size, streamed)
            problem = memory.problem(batches[-1] * (context_length + largest_tree(profile)))
            predictions = []
            if problem is None:
                cost = CostModel(profile)
                predictions = [_predict(cost, acceptance, batch) for batch in batches]
            rows.append(ScalingRow(device, size, memory, problem, predictions, streamed))
    return rows


def _predict(cost: CostModel, acceptance: Acceptance, batch_size: int) -> Prediction:
    tree = choose_tree(acceptance, cost.profile, batch_size, largest_tree(cost.profile))
    estimate = cost.estimate(tree, acceptance, batch_size)
    return Prediction(
        batch_size=batch_size,
        plain_seconds=cost.plain_seconds(batch_size),
        draft_level_seconds=float(cost.draft_seconds(1, batch_size)),
        size=tree.size,
        depth=tree.depth,
        expected_tokens=estimate.expected_tokens,
        seconds_per_token=estimate.seconds / estimate.expected_tokens,
        speedup=estimate.speedup,
    )
