"""A tree's whole growth as one CUDA graph per batch size and number of drafts."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorBatchDescriptor,
)


class DraftGraphs(CudaGraphManager):
    """vLLM's graph manager (memory pool, capture sizes, profiling) for drafting passes.

    vLLM's own draft models run without graphs.

    Args:
        vllm_config, device: The engine's.
        mode: The target's graph mode; growth is captured if decoding is.
        drafts: Numbers of drafts that the engine's schedule has.
        max_requests: Largest batch that drafts.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        mode: CUDAGraphMode,
        drafts: Collection[int],
        max_requests: int,
    ) -> None:
        full = mode.decode_mode() == CUDAGraphMode.FULL
        own_mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        super().__init__(vllm_config, device, own_mode, decode_query_len=1)
        self._capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]] = {
            mode: [
                _with_drafts(shape, number)
                for shape in shapes
                for number in sorted(drafts, reverse=True)
                if (shape.num_reqs or 0) <= max_requests
            ]
            for mode, shapes in self._capture_descs.items()
        }

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
        shape = self.dispatch(num_reqs, num_reqs, 1, 0)
        if shape.cg_mode != CUDAGraphMode.FULL:
            return None
        shape = _with_drafts(shape, drafts)
        return shape if shape in self.graphs else None


def _with_drafts(shape: BatchExecutionDescriptor, drafts: int) -> SpeculatorBatchDescriptor:
    return SpeculatorBatchDescriptor(**vars(shape), num_speculative_tokens=drafts)
