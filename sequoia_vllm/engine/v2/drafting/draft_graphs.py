"""The draft's passes as CUDA graphs, one per number of requests and of tokens."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

RAGGED = 0
"""In place of the tokens of each request: the pass takes any number of each."""

logger = logging.getLogger("vllm.sequoia")

# Graphs captured on trial, and the least memory assumed per graph, as in vLLM's own profile.
_TRIED, _LEAST_BYTES = 2, 1 << 20


class DraftGraphs(CudaGraphManager):
    """vLLM's graph manager (memory pool, capture, replay) for one of the draft's passes.

    vLLM's own draft models run without graphs, and its capture sizes are the target's.

    Args:
        mode: The target's graph mode; the draft's passes are captured if decoding is.
        run: The pass, ``run(requests, tokens, rows)``: tokens (or drafts) per request, `RAGGED` for
            any number, and tokens of all.
        sizes: Requests of the graphs, ascending, by the pass's tokens (or drafts) per request.
        ragged: Requests and rows of ragged graphs, ascending by rows.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        mode: CUDAGraphMode,
        run: Callable[[int, int, int], None],
        title: str,
        sizes: Mapping[int, Sequence[int]],
        ragged: Sequence[tuple[int, int]] = (),
    ) -> None:
        full = mode.decode_mode() == CUDAGraphMode.FULL
        own_mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        super().__init__(vllm_config, device, own_mode, decode_query_len=1)
        self._run, self._title = run, title
        self._shapes = {
            tokens: [_shape(requests, requests * tokens, tokens) for requests in sizes[tokens]]
            for tokens in sorted(sizes)
        }
        self._shapes[RAGGED] = [_shape(*size, RAGGED) for size in ragged]
        if not full:
            self._shapes = {}
        # The largest first: smaller graphs then reuse its memory.
        every = [shape for shapes in self._shapes.values() for shape in shapes]
        shapes = sorted(every, key=lambda shape: shape.num_tokens, reverse=True)
        self._capture_descs = {CUDAGraphMode.FULL: shapes} if shapes else {}

    def capture_all(self, on_trial: bool = False) -> None:
        """Captures every shape; on trial the largest: `untried_bytes` estimates the others."""
        if on_trial:
            self._max_full_descs_to_capture = _TRIED
            self._capture_mem_samples: list[int] = []

        def forward_of(
            shape: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            requests, tokens = shape.num_reqs or 0, shape.uniform_token_count or RAGGED
            return lambda _: self._run(requests, tokens, shape.num_tokens)

        self.capture(forward_of, self._title)

    @property
    def untried_bytes(self) -> int:
        """Memory of graphs not captured on trial, if each takes as much as the last captured."""
        untried = sum(map(len, self._shapes.values())) - len(self.graphs)
        *_, taken = self._capture_mem_samples or [0]
        return untried * max(taken, _LEAST_BYTES)

    def tokens_for(self, num_reqs: int) -> list[int]:
        """Tokens per request for which a graph fits so many requests, ascending; also `RAGGED`."""
        return sorted(tokens for tokens in self._shapes if self._shape_of(num_reqs, tokens))

    def replay(self, num_reqs: int, tokens: int, rows: int = 0) -> bool:
        """Replays the smallest graph that fits; False: there is none.

        Args:
            tokens: Tokens (or drafts) per request, or `RAGGED`: then of all requests ``rows``.
        """
        if shape := self._shape_of(num_reqs, tokens, rows):
            self.run_fullgraph(shape)
        return shape is not None

    def _shape_of(
        self, num_reqs: int, tokens: int, rows: int = 0
    ) -> BatchExecutionDescriptor | None:
        for shape in self._shapes.get(tokens, ()):
            fits = (shape.num_reqs or 0) >= num_reqs and shape.num_tokens >= rows
            if fits and shape in self.graphs:
                return shape
        return None


def capture_drafting(every: Sequence[DraftGraphs], on_trial: bool) -> None:
    """Captures all graphs; on trial the largest of each."""
    free, started = torch.accelerator.get_memory_info()[0], time.perf_counter()
    for graphs in every:
        graphs.capture_all(on_trial)
    if not on_trial:
        taken = free - torch.accelerator.get_memory_info()[0]
        logger.info(
            "Sequoia: %d CUDA graphs of the draft (%d for prompts) took %.1f s and %.2f GiB",
            sum(len(graphs.graphs) for graphs in every),
            sum(shape.uniform_token_count is None for graphs in every for shape in graphs.graphs),
            time.perf_counter() - started, taken / (1 << 30),
        )  # fmt: skip


def _shape(num_reqs: int, rows: int, tokens: int) -> BatchExecutionDescriptor:
    return BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.FULL,
        num_tokens=rows,
        num_reqs=num_reqs,
        uniform_token_count=tokens or None,
    )
