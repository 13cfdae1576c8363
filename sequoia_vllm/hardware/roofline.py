"""Computes a profile of a device that nobody measured, from its datasheet (paper, section 4.1).

Each forward pass is the sum of its matrix products, its attention, its kernel launches, its logits
and, on several devices, its reductions. Products and attention take the root of the summed squares
of moving their bytes and doing their arithmetic. Decoding is bound by bytes. So speculation pays:
scoring a tree costs little more than one token until operations per byte are half used up.

More devices divide products and attention. They do not divide launches and logits, and add
reductions. The draft is split like the target, as vLLM requires. So a draft level becomes dearer
relative to the target, and the best trees become shallower.

Figures that no datasheet has are in `Assumptions`, and are copied into the profile. Nothing here
checks that the models fit the memory.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from sequoia_vllm.drafters.registry import drafts_in_one_pass
from sequoia_vllm.hardware.device import DeviceSpec
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.step_profile import Curve, Overhead, Profile
from sequoia_vllm.hardware.streaming import StreamedWeights

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# The paper's largest tree on one GPU: larger ones rest on a measured profile.
ROOFLINE_MAX_SIZE = 128
# The paper's largest tree where weights are streamed, and the tokens to time up to it.
STREAMED_MAX_SIZE = 768
STREAMED_TOKENS = (*TOKENS, 160, 192, 256, 320, 384, 512, 640, STREAMED_MAX_SIZE)
# Batches whose trees have more steps of tiles are timed without them: each is a small part then.
_MOST_TILES = 64
BYTES_PER_VALUE = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}
# A mesh has eight devices; a link of each leads to each of the seven others.
_MESH_NEIGHBOURS = 7


@dataclass(frozen=True)
class Assumptions:
    """Figures that no datasheet has: we chose them and did not measure them. Those of reductions
    follow published measurements (docs/predictions.md)."""

    bandwidth_efficiency: float = 0.85  # achieved share of it
    compute_efficiency: float = 0.65  # achieved share of the dense matrix rate
    layer_seconds: float = 25e-6  # launches and small kernels of one layer, CUDA graphs on
    forward_seconds: float = 60e-6  # outside layers, sampling included
    plain_step_seconds: float = 300e-6  # a plain step outside the forward pass
    tree_step_seconds: float = 600e-6  # the same with trees: some twenty launches of ours
    # A kernel in a CUDA graph that does next to nothing. In a graph of kernels of 2.9 us NVIDIA
    # measured 3.4 us for each ("Getting Started with CUDA Graphs", 2019); a small kernel itself
    # takes 1 to 2 us.
    small_kernel_seconds: float = 2e-6
    # Kernels of ours in a draft level, outside the draft model, counted where kernels are
    # interpreted: one that prepares, three that draw. Not the two that look for a draft's nucleus,
    # which end at once where no request has top-k, top-p or min-p.
    level_kernels: float = 4
    # Requests times key heads below which tree attention splits contexts, to occupy all
    # processors: the results are merged by one kernel more in each layer.
    split_below: float = 128
    logits_passes: float = 6.0  # times the float32 logits of a node are read or written
    link_efficiency: float = 0.8  # achieved share of the rate between devices
    one_shot_seconds: float = 6e-6  # a one-shot reduction of nothing: launch and one barrier
    two_shot_seconds: float = 12e-6  # a two-shot reduction of nothing: one barrier more
    ring_seconds: float = 10e-6  # start of a ring (NCCL's or RCCL's)
    ring_step_seconds: float = 1e-6  # each of its steps, without bytes


def roofline_profile(
    device: DeviceSpec,
    target: ModelShape,
    draft: ModelShape,
    dtype: str = "bfloat16",
    tensor_parallel_size: int = 1,
    context_length: int = 1024,
    assumptions: Assumptions | None = None,
    tokens: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    streamed: StreamedWeights | None = None,
) -> Profile:
    """The profile that datasheet values predict.

    Args:
        dtype: Weight and KV cache type; a key of `BYTES_PER_VALUE`.
        assumptions: What the datasheet does not say; None: the defaults.
        tokens: Tokens per request, increasing, from 1; None: up to `largest_tree`.
        streamed: Weights of the target that are not in the devices' memory; None: all are.

    Raises:
        ValueError: ``dtype`` is not known, a model cannot be split over so many devices, or the
            draft does not fit beside streamed weights.
    """
    value_bytes = bytes_per_value(dtype)
    for shape in (target, draft):
        shape.check_split(tensor_parallel_size)
    assumptions = assumptions or Assumptions()
    forward = _Forward(device, value_bytes, tensor_parallel_size, assumptions)
    if streamed is not None:
        forward.check_draft_fits(draft, streamed)

    def curves(
        time: Callable[[int, int], float], weights: StreamedWeights | None = None
    ) -> list[Curve]:
        """Curves over the tokens of each request, one for each batch size."""
        counts = {n: list(tokens) if tokens else _tokens_to_time(weights, n) for n in batch_sizes}
        return [
            Curve(
                batch_size=batch,
                context_length=context_length,
                tokens=counts[batch],
                # Six digits: the same on every platform, and more than a model deserves.
                seconds=[float(f"{time(count, batch):.6g}") for count in counts[batch]],
            )
            for batch in batch_sizes
        ]

    draws = assumptions.level_kernels * assumptions.small_kernel_seconds

    def scoring(count: int, batch: int) -> float:
        return forward.seconds(target, count, batch, context_length, streamed)

    def level(count: int, batch: int) -> float:
        if drafts_in_one_pass(draft.head):
            return forward.logits_passes(draft, count * batch) + draws
        return forward.seconds(draft, count, batch, context_length) + draws

    def reading(count: int, batch: int) -> float:
        passing = forward.seconds(draft, count, batch, context_length) + draws
        return passing + forward.reading(draft, count * batch)

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
        target_forward=curves(scoring, streamed),
        draft_level=curves(level),
        draft_reading=None if draft.head is None else curves(reading),
        head=draft.head,
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
        assumptions=asdict(assumptions),
        streamed=streamed,
    )


def largest_tree(profile: Profile) -> int:
    """Nodes of the largest tree that computed times are used for, root included."""
    return STREAMED_MAX_SIZE if profile.streamed else ROOFLINE_MAX_SIZE


def bytes_per_value(dtype: str) -> float:
    """Bytes of a weight or key of this type.

    Raises:
        ValueError: The type is not known; the message lists those that are.
    """
    if dtype not in BYTES_PER_VALUE:
        raise ValueError(f"dtype {dtype!r}: known are {', '.join(BYTES_PER_VALUE)}")
    return BYTES_PER_VALUE[dtype]


def _tokens_to_time(streamed: StreamedWeights | None, batch: int) -> list[int]:
    """Tokens up to the largest tree; where products read weights, around each step in rows."""
    if streamed is None:
        return list(TOKENS)
    counts = set(STREAMED_TOKENS)
    tile = streamed.tile_rows
    if tile is not None and STREAMED_MAX_SIZE * batch <= _MOST_TILES * tile:
        ends = {rows // batch for rows in range(tile, STREAMED_MAX_SIZE * batch, tile)}
        counts |= ends | {end + 1 for end in ends}
    return sorted(counts)


class Interconnect:
    """The links between the devices of one tensor-parallel group, and times of their reductions.

    A tensor of S bytes is added up over p devices in one of three ways. A device's
    link carries its rate B in each direction at once, so the busier direction counts:

    | way | bytes through a link | time of nothing |
    |---|---|---|
    | one-shot: each device reads the whole tensor of every other | (p - 1) S | one barrier |
    | two-shot: each adds up its p-th part, then reads the others' | 2 (p - 1) / p S | two |
    | ring: 2 (p - 1) steps of S / p to the neighbour | 2 (p - 1) / p S | 2 (p - 1) steps |

    One-shot and two-shot are vLLM's own kernels, for two devices that can read each other's memory,
    and for more where each has a direct link to every other. All the rest gets the ring of NCCL or
    RCCL ("Custom allreduce is disabled because it's not supported on more than two PCIe-only
    GPUs"). The model takes the cheapest way that is allowed, as vLLM's thresholds by size aim to.

    docs/predictions.md says where the assumed figures come from, and what is not modelled.
    """

    def __init__(self, device: DeviceSpec, devices: int, assumed: Assumptions) -> None:
        self.devices = devices
        self._assumed = assumed
        self._bytes_per_second = device.interconnect_gb_s * 1e9 * assumed.link_efficiency
        if device.interconnect_kind == "mesh":
            # Links to devices outside the group carry nothing of it.
            self._bytes_per_second *= min(1.0, (devices - 1) / _MESH_NEIGHBOURS)
        direct = device.interconnect_kind in ("switch", "mesh")
        self._own_kernels = direct or (device.interconnect_kind == "bus" and devices == 2)

    def all_reduce(self, size: float) -> float:
        """Seconds until every device has the sum of ``size`` bytes of each; 0 for one device."""
        if self.devices == 1:
            return 0.0
        assumed = self._assumed
        others = self.devices - 1
        halves = 2 * others / self.devices * size  # both halves of a ring or a two-shot
        ways = [(assumed.ring_seconds + 2 * others * assumed.ring_step_seconds, halves)]
        if self._own_kernels:
            ways += [(assumed.one_shot_seconds, others * size), (assumed.two_shot_seconds, halves)]
        return min(start + moved / self._bytes_per_second for start, moved in ways)

    def all_gather(self, size: float) -> float:
        """Seconds until every device has all ``size`` bytes, of which each had a p-th, by a ring of
        p - 1 steps: vLLM leaves this to the library; 0 for one device."""
        if self.devices == 1:
            return 0.0
        others = self.devices - 1
        start = self._assumed.ring_seconds + others * self._assumed.ring_step_seconds
        return start + others / self.devices * size / self._bytes_per_second


class _Forward:
    def __init__(
        self, device: DeviceSpec, value_bytes: float, devices: int, assumed: Assumptions
    ) -> None:
        self._device = device
        self._bytes_per_second = device.bandwidth_gb_s * 1e9 * assumed.bandwidth_efficiency
        self._operations_per_second = device.bf16_tflops * 1e12 * assumed.compute_efficiency
        self._value_bytes = value_bytes
        # Quantized weights leave what is computed with them in half precision.
        self._activation_bytes = max(2.0, value_bytes)
        self._devices = devices
        self._links = Interconnect(device, devices, assumed)
        self._assumed = assumed

    def check_draft_fits(self, draft: ModelShape, streamed: StreamedWeights) -> None:
        """Refuses a draft that leaves no memory beside the buffers of streamed weights."""
        own, device = draft.weights_bytes(self._value_bytes) / self._devices, self._device
        if (needed := own + streamed.buffer_bytes) >= device.memory_bytes:
            raise ValueError(
                f"the draft {draft.name} and the buffers of streamed weights take "
                f"{needed / 2**30:.1f} GiB of {device.name}'s {device.memory_bytes / 2**30:.0f}: "
                "only the target is offloaded, so use a smaller or quantized draft, or more devices"
            )

    def seconds(
        self,
        shape: ModelShape,
        tokens: int,
        batch: int,
        context: int,
        streamed: StreamedWeights | None = None,
    ) -> float:
        """Time for ``tokens`` tokens of each of ``batch`` requests."""
        rows = tokens * batch
        moved = shape.matmul_bytes(self._value_bytes, rows)
        if streamed is not None and streamed.tile_rows is not None:  # products read them outside
            moved = max(0.0, moved - streamed.bytes_per_pass * self._devices)
        products = self._roofline(moved, 2 * shape.matmul_parameters * rows)
        kv_value_bytes = shape.kv_value_bytes or self._value_bytes
        kv_bytes = batch * context * shape.kv_values_per_token * kv_value_bytes
        attention = self._roofline(
            kv_bytes * shape.kv_copies(self._devices),
            shape.attention_operations * (context + tokens) * rows,
        )
        attention += self._states(shape, tokens, batch)
        launches = shape.layers * self._assumed.layer_seconds + self._assumed.forward_seconds
        launches += self._merges(shape, tokens, batch)
        # Collecting the logits' parts; adding up the residual stream after embedding, attention
        # and MLP. vLLM does both in the model's type, and samples on every device.
        gathered = rows * shape.output_vocab * self._activation_bytes
        added = rows * shape.hidden * self._activation_bytes
        computing = products + attention + launches
        computing += self._links.all_gather(gathered) + self.logits_passes(shape, rows)
        computing += (2 * shape.layers + 1) * self._links.all_reduce(added)
        return computing if streamed is None else streamed.pass_seconds(rows, computing)

    def _states(self, shape: ModelShape, tokens: int, batch: int) -> float:
        """Time of recurrent layers' states, read and written in float32 whatever the context; a
        tree reads them once more, in the commit."""
        if shape.recurrent is None:
            return 0.0
        passes = 2 if tokens == 1 else 3
        return self._roofline(
            4 * passes * batch * shape.recurrent.state_values,
            batch * shape.recurrent.scoring_operations(tokens),
        )

    def reading(self, shape: ModelShape, rows: int) -> float:
        """Time of a head's products with the target's hidden states, on each device alike."""
        moved = shape.reading_bytes(self._value_bytes)
        return self._devices * self._roofline(moved, 2 * shape.reading_parameters * rows)

    def logits_passes(self, shape: ModelShape, rows: int) -> float:
        """Seconds of each device's passes over logits, or over Q where nodes are drawn."""
        passes = self._assumed.logits_passes
        return rows * shape.vocab * 4 * passes / self._bytes_per_second

    def _merges(self, shape: ModelShape, tokens: int, batch: int) -> float:
        """Seconds to merge tree attention's splits; plain decoding's are in its launches."""
        key_heads = shape.kv_heads * shape.kv_copies(self._devices) / self._devices
        if tokens == 1 or batch * key_heads >= self._assumed.split_below:
            return 0.0
        return shape.attention_layers * self._assumed.small_kernel_seconds

    def _roofline(self, moved: float, operations: float) -> float:
        """Seconds of work that is split over all devices. The longer of reading and computing has a
        corner, where nodes look free until both take as long, and the best trees end just there. An
        H100 has none, and fits this root without a constant (docs/notebook/2026-11-22-h100.md)."""
        reading = moved / self._bytes_per_second
        computing = operations / self._operations_per_second
        return math.hypot(reading, computing) / self._devices
