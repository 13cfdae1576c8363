"""Captures the target's CUDA graphs for all numbers of drafts that the engine can reach.

These are the schedule's, and others if the engine adapts. vLLM itself captures each of its sizes
for every number of drafts in the schedule. It then gives a batch the next larger captured number
of tokens. If that graph is for another number of drafts, the batch runs without a full graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from sequoia_vllm.engine.common.draft_schedule import (
    fewer_drafts,
    reachable_drafts,
    scheduled_drafts,
)
from sequoia_vllm.hardware.graph_sizes import decode_shapes, mixed_shapes


@dataclass(frozen=True)
class LongBatch(BatchExecutionDescriptor):
    """A decode step like its twin of vLLM's class, whose contexts FlashAttention reads."""


class TreeGraphManager(ModelCudaGraphManager):
    """vLLM's manager with full graphs for each number of drafts, at the batch sizes that use it.

    Args:
        captures_mixed: Whether there are full graphs for mixed steps, too: of any requests with
            trees, prompts or single tokens. They are `MixedSteps`'.
        long_from: Least tokens per request of full graphs in whose twins FlashAttention reads the
            contexts; None: there are no such twins.

    Attributes:
        is_long: Whether FlashAttention reads the contexts of the next step, or of what is captured.
        may_be_mixed: Whether the next step may take such a graph.
        is_mixed: Whether the last one did.
    """

    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    _candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]]

    def __init__(
        self,
        *args: Any,
        captures_mixed: bool = False,
        long_from: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._captures_mixed, self._long_from = captures_mixed, long_from
        self._mixed: list[BatchExecutionDescriptor] = []
        self.is_long = self.may_be_mixed = self.is_mixed = False
        super().__init__(*args, **kwargs)

    # Until: vLLM captures for each range of a schedule its own batches.
    def _init_candidates(self) -> None:
        """Calls vLLM's, then takes the full graphs for decode steps from `decode_shapes`."""
        super()._init_candidates()
        mode = CUDAGraphMode.FULL
        # Full graphs for all steps, or for two micro-batches, do not depend on drafts.
        if mode not in self._capture_descs or not self.cudagraph_mode.separate_routine():
            return
        if self.ubatch_runner is not None:
            return
        most_tokens = self.compilation_config.max_cudagraph_capture_size
        assert most_tokens is not None
        tokens_by_batch = [drafts + 1 for drafts in scheduled_drafts(self.vllm_config)]
        others = [drafts + 1 for drafts in fewer_drafts(self.vllm_config)]
        most_by_batch = [drafts + 1 for drafts in reachable_drafts(self.vllm_config)]
        shapes = decode_shapes(tokens_by_batch, most_tokens, others, most_by_batch)
        uniform = [
            _full_graph(tokens * requests, requests, loras, tokens)
            for tokens, requests in shapes
            for loras in self.lora_capture_cases
        ]
        if self._captures_mixed and self.cudagraph_mode.has_piecewise_cudagraphs():
            self._mixed = [  # the smallest first
                _full_graph(tokens, requests, loras)
                for tokens, requests in mixed_shapes(self.max_num_reqs, most_tokens)
                for loras in self.lora_capture_cases
            ]
        uniform.sort(key=attrgetter("num_tokens"), reverse=True)
        least = self._long_from
        long = [
            _long(graph)
            for graph in uniform
            if least is not None and (graph.uniform_token_count or 0) >= least
        ]
        graphs = sorted([*uniform, *self._mixed, *long], key=attrgetter("num_tokens"), reverse=True)
        # Ours are for what a draft reads and for growth, and only for batches that draft; for the
        # target only what the schedule can reach. Until: vLLM captures draft models' steps, and for
        # each range of a schedule its own batches.
        self._capture_descs = {**self._capture_descs, mode: graphs}
        # Gives a batch the next larger graph of any number of drafts, not the next of its own.
        # Until: vLLM looks graphs up by number of drafts.
        self._candidates = {
            (tokens, loras): [
                *_smallest_of_each(uniform, tokens, loras),
                *(
                    graph
                    for graph in self._candidates.get((tokens, loras), ())
                    if graph.cg_mode != mode
                ),
            ]
            for tokens in range(most_tokens + 1)
            for loras in self.lora_capture_cases
        }

    # Until: vLLM tells what is captured which graph it is for.
    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's, for graphs whose contexts FlashAttention reads apart from the others."""
        every, full = self._capture_descs, self._capture_descs.get(CUDAGraphMode.FULL, [])
        long = [graph for graph in full if isinstance(graph, LongBatch)]
        others = [graph for graph in full if not isinstance(graph, LongBatch)]
        try:
            self._capture_descs = {**every, CUDAGraphMode.FULL: others} if long else every
            super().capture(*args, **kwargs)
            if long and self._max_full_descs_to_capture is None:  # not on trial, for memory
                self.is_long, self._capture_descs = True, {CUDAGraphMode.FULL: long}
                super().capture(*args, **kwargs)
        finally:
            self.is_long, self._capture_descs = False, every

    # Until: vLLM captures prompts beside decoding in full graphs where it also has others.
    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        *args: Any,
        **kwargs: Any,
    ) -> BatchExecutionDescriptor:
        """Calls vLLM's; where it has no full graph, takes one for mixed steps.

        Steps with long contexts take the graph's twin for those.
        """
        found = super().dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras, *args, **kwargs
        )
        self.is_mixed = False
        if found.cg_mode == CUDAGraphMode.FULL and self.is_long:
            return long if (long := _long(found)) in self.graphs else found
        if found.cg_mode == CUDAGraphMode.FULL or not self.may_be_mixed:
            return found
        loras = self._resolve_effective_loras(num_active_loras)
        fitting = (
            graph
            for graph in self._mixed
            if graph.num_tokens >= num_tokens
            and (graph.num_reqs or 0) >= num_reqs
            and graph.num_active_loras == loras
            and graph in self.graphs  # on trial, few are
        )
        mixed = next(fitting, None)
        self.is_mixed = mixed is not None
        return mixed or found


def _full_graph(
    tokens: int, requests: int, loras: int, each: int | None = None
) -> BatchExecutionDescriptor:
    """A full graph of so many tokens, ``each`` per request; None: any number per request."""
    return BatchExecutionDescriptor(
        cg_mode=CUDAGraphMode.FULL,
        num_tokens=tokens,
        num_reqs=requests,
        uniform_token_count=each,
        num_active_loras=loras,
    )


def _long(graph: BatchExecutionDescriptor) -> LongBatch:
    return LongBatch(**vars(graph))


def _smallest_of_each(
    graphs: list[BatchExecutionDescriptor], tokens: int, loras: int
) -> list[BatchExecutionDescriptor]:
    """The smallest graph for so many tokens, of each number per request; ``graphs`` descend."""
    found = {
        graph.uniform_token_count: graph
        for graph in graphs
        if graph.num_tokens >= tokens and graph.num_active_loras == loras
    }
    return list(found.values())
