"""Captures the target's CUDA graphs for all numbers of drafts that the engine can reach.

These are the schedule's, and others if the engine adapts. vLLM itself captures each of its sizes
for every number of drafts in the schedule. It then gives a batch the next larger captured number
of tokens. If that graph is for another number of drafts, the batch runs without a full graph.
"""

from __future__ import annotations

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from sequoia_vllm.engine.common.draft_schedule import fewer_drafts, most_drafts, scheduled_drafts
from sequoia_vllm.hardware.graph_sizes import decode_shapes


class TreeGraphManager(ModelCudaGraphManager):
    """vLLM's manager with full graphs for each number of drafts, at the batch sizes that use it.

    Its constructor calls `_init_candidates` once, when the engine starts. This sets which graphs
    vLLM captures, and which of them it tries for a batch of so many tokens.
    """

    _capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]]
    _candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]]

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
        # Ours are for what a draft reads and for growth, and only for batches that draft; for the
        # target only what the schedule can reach. Until: vLLM captures draft models' steps, and for
        # each range of a schedule its own batches.
        self._capture_descs = {**self._capture_descs, mode: graphs}
        # Gives a batch the next larger graph of any number of drafts, not the next of its own.
        # Until: vLLM looks graphs up by number of drafts.
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
    """The smallest graph for at least ``tokens`` tokens, for each number of tokens per request.

    Args:
        graphs: All full graphs, largest first.
        tokens: Tokens of the batch.
        loras: Number of adapters, as vLLM counts them for a graph.
    """
    found = {
        graph.uniform_token_count: graph
        for graph in graphs
        if graph.num_tokens >= tokens and graph.num_active_loras == loras
    }
    return list(found.values())
