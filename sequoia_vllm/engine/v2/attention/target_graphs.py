"""The target's CUDA graphs: those that the engine's schedule can reach, and found by all batches.

An engine can reach the schedule's numbers of drafts, and others where it adapts. vLLM captures
every one of its sizes for every number of drafts in the schedule. It gives a batch the next
larger captured number of tokens, for any number of drafts. If that graph is for another number,
the batch runs without a full graph.
"""

from __future__ import annotations

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from sequoia_vllm.engine.common.draft_schedule import fewer_drafts, most_drafts, scheduled_drafts
from sequoia_vllm.hardware.graph_sizes import decode_shapes


class TreeGraphManager(ModelCudaGraphManager):
    """vLLM's manager with other full graphs: per number of drafts, for the batches that have it.

    Its constructor calls `_init_candidates` once, when the engine starts. That sets which graphs
    vLLM captures, and which of them it tries for a step's batch, by its tokens.
    """

    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    _candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]]

    def _init_candidates(self) -> None:
        """Calls vLLM's, then takes the full graphs for decode steps from `decode_shapes`."""
        super()._init_candidates()
        mode = CUDAGraphMode.FULL
        # Full graphs for everything, or of two micro-batches, are not by number of drafts.
        if mode not in self._capture_descs or not self.cudagraph_mode.separate_routine():
            return
        if self.ubatch_runner is not None:
            return
        most_tokens = self.compilation_config.max_cudagraph_capture_size
        assert most_tokens is not None
        graphs = [
            BatchExecutionDescriptor(
                cg_mode=mode,
                num_tokens=tokens * requests,
                num_reqs=requests,
                uniform_token_count=tokens,
                num_active_loras=loras,
            )
            for tokens, requests in self._shapes(most_tokens)
            for loras in self.lora_capture_cases
        ]
        graphs.sort(key=lambda graph: graph.num_tokens, reverse=True)
        self._capture_descs = {**self._capture_descs, mode: graphs}
        self._candidates = {
            (tokens, loras): [
                *_smallest_of_each(graphs, tokens, loras),
                *(
                    graph
                    for graph in self._candidates.get((tokens, loras), ())
                    if graph.cg_mode != mode
                ),
            ]
            for tokens in range(most_tokens + 1)
            for loras in self.lora_capture_cases
        }

    def _shapes(self, most_tokens: int) -> list[tuple[int, int]]:
        """See `decode_shapes`."""
        tokens_by_batch = [drafts + 1 for drafts in scheduled_drafts(self.vllm_config)]
        others = [drafts + 1 for drafts in fewer_drafts(self.vllm_config)]
        most_by_batch = [drafts + 1 for drafts in most_drafts(self.vllm_config)]
        return decode_shapes(tokens_by_batch, most_tokens, others, most_by_batch)


def _smallest_of_each(
    graphs: list[BatchExecutionDescriptor], tokens: int, loras: int
) -> list[BatchExecutionDescriptor]:
    """For each number of tokens per request the smallest graph for ``tokens`` tokens or more.

    Args:
        graphs: Largest first.
        tokens: Tokens of the batch.
        loras: Adapters, as vLLM counts them for a graph.
    """
    found = {
        graph.uniform_token_count: graph
        for graph in graphs
        if graph.num_tokens >= tokens and graph.num_active_loras == loras
    }
    return list(found.values())
