"""A tree's whole growth as one CUDA graph per batch size and number of drafts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorBatchDescriptor,
)

from sequoia_vllm.drafting.draft_plan import DraftPlan


class DraftGraphs(CudaGraphManager):
    """vLLM's graph manager (memory pool, capture, replay) for drafting passes.

    vLLM's own draft models run without graphs. Its capture sizes are the target's:
    ours follow from the schedule.

    Args:
        vllm_config, device: The engine's.
        mode: The target's graph mode; growth is captured if decoding is.
        plan: The batches that draft.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, mode: CUDAGraphMode, plan: DraftPlan
    ) -> None:
        full = mode.decode_mode() == CUDAGraphMode.FULL
        own_mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        super().__init__(vllm_config, device, own_mode, decode_query_len=1)
        self._shapes = {
            drafts: [_shape(size, drafts) for size in plan.graph_sizes(drafts)]
            for drafts in (plan.drafts if full else ())
        }
        # The largest first: the others then fit into its memory.
        shapes: list[BatchExecutionDescriptor] = [
            shape for sizes in self._shapes.values() for shape in reversed(sizes)
        ]
        self._capture_descs = {CUDAGraphMode.FULL: shapes} if shapes else {}

    def capture_growth(self, grow: Callable[[int, int], None]) -> None:
        """Captures ``grow(num_requests, drafts)`` for every shape."""

        def forward_of(
            shape: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            assert isinstance(shape, SpeculatorBatchDescriptor)
            requests, drafts = shape.num_reqs or 0, shape.num_speculative_tokens
            return lambda _: grow(requests, drafts)

        self.capture(forward_of, "Capturing tree growth")

    def shape_of(self, num_reqs: int, drafts: int) -> BatchExecutionDescriptor | None:
        """The captured shape that serves this batch, or None."""
        for shape in self._shapes.get(drafts, ()):
            if shape.num_reqs is not None and shape.num_reqs >= num_reqs and shape in self.graphs:
                return shape
        return None


def _shape(num_reqs: int, drafts: int) -> SpeculatorBatchDescriptor:
    return SpeculatorBatchDescriptor(
        cg_mode=CUDAGraphMode.FULL,
        num_tokens=num_reqs,
        num_reqs=num_reqs,
        uniform_token_count=1,
        num_speculative_tokens=drafts,
    )
