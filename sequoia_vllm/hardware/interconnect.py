"""Figures that no datasheet has, and times of reductions between devices.

A tensor of S bytes is added up over p devices in one of three ways. A device's
link carries its rate B in each direction at once, so the busier direction counts:

| way | bytes through a link | time of nothing |
|---|---|---|
| one-shot: each device reads the whole tensor of every other | (p - 1) S | one barrier |
| two-shot: each adds up its p-th part, then reads the others' | 2 (p - 1) / p S | two |
| ring: 2 (p - 1) steps of S / p to the neighbour | 2 (p - 1) / p S | 2 (p - 1) steps |

One-shot and two-shot are vLLM's own kernels, for two devices that can read each other's memory, and
for more where each has a direct link to every other. All the rest gets the ring of NCCL or RCCL
("Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs"). The
model takes the cheapest way that is allowed. vLLM's thresholds by size aim at the same.

Where the assumed figures come from (none was measured by us):

- Bandwidth: 450 GB/s in each direction of an H100's NVLink become 370 in a ring, by an
  author of NCCL (NVIDIA/nccl-tests#212): a share of 0.82.
- One-shot and two-shot on 4 H100, bfloat16 rows of 8,192 (vllm-project/vllm#24532): 10
  and 17 us for 0.5 MiB, 14 and 18 us for 1 MiB, 38 and 42 us for 4 MiB. The formulas
  above give 10 and 14, 15 and 16, 41 and 29 us.
- Rings: about 18 us of start on 4 GPUs and 20 on 6 and 8, read off the same tables and
  ByteDance-Seed/Triton-distributed#57; 36 us on 16 GPUs over PCIe
  (local-inference-lab/b12x#139). The formula gives 16, 20, 24 and 40 us.

Not modelled: reduction inside the switch (NVLink SHARP) and fusing the reduction with
the normalization after it, both of which make large reductions cheaper than said here.
"""

from dataclasses import dataclass

from sequoia_vllm.hardware.device import DeviceSpec


@dataclass(frozen=True)
class Assumptions:
    """Figures that no datasheet has: we chose them and did not measure them. Those of reductions
    follow published measurements, see this module's text."""

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


# A mesh has eight devices; a link of each leads to each of the seven others.
_MESH_NEIGHBOURS = 7


class Interconnect:
    """The links between the devices of one tensor-parallel group."""

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
