"""Figures that the roofline needs and no datasheet has."""

from __future__ import annotations

from pydantic import Field

from sequoia_vllm.json_file import FileModel


class Assumptions(FileModel):
    """Figures that no datasheet has. We chose them and did not measure them.

    Figures of reductions follow published measurements, see `sequoia_vllm.hardware.interconnect`.
    """

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
        default=600e-6,
        ge=0,
        description="A speculative step outside the forward passes: some twenty launches of ours "
        "one by one among it.",
    )
    # In a graph of kernels of 2.9 us NVIDIA measured 3.4 us for each ("Getting Started with CUDA
    # Graphs", 2019); a small kernel itself takes 1 to 2 us.
    small_kernel_seconds: float = Field(
        default=2e-6, ge=0, description="A kernel in a CUDA graph that does next to nothing."
    )
    # Counted where kernels are interpreted: one that prepares, three that draw. Not the two that
    # look for a draft's nucleus, which end at once where no request has top-k, top-p or min-p.
    level_kernels: float = Field(
        default=4, ge=0, description="Kernels of ours in a draft level, outside the draft model."
    )
    split_below: float = Field(
        default=128,
        ge=0,
        description="Requests times key heads below which tree attention splits contexts, to "
        "occupy all processors: the results are merged by one kernel more in each layer.",
    )
    logits_passes: float = Field(
        default=6.0, ge=0, description="Times the float32 logits of a node are read or written."
    )
    link_efficiency: float = Field(
        default=0.8, gt=0, le=1, description="Achieved share of the rate between devices."
    )
    one_shot_seconds: float = Field(
        default=6e-6, ge=0, description="A one-shot reduction of nothing: launch and one barrier."
    )
    two_shot_seconds: float = Field(
        default=12e-6, ge=0, description="A two-shot reduction of nothing: one barrier more."
    )
    ring_seconds: float = Field(
        default=10e-6, ge=0, description="Start of a ring (a collective of NCCL or RCCL)."
    )
    ring_step_seconds: float = Field(
        default=1e-6, ge=0, description="Each step of a ring, its bytes not counted."
    )
