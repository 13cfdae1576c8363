"""Times the graphs of decode steps once they are captured: so the engine knows what drafts cost.

A replay does what the run before the capture did, on inputs made alike. Its rows are padding, and
write nothing that is kept. All ranks replay the same graphs in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from statistics import median
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, prepare_inputs_to_capture

from sequoia_vllm.adaptation.step_times import Timed
from sequoia_vllm.kernels.modes import GREEDY, SKIP

_REPLAYS = 3  # of each graph; the median counts
_APART = 7919  # a prime: tokens far apart, so that a mixture sends rows to many experts

Graph = tuple[str, int, int]
"""What a graph does; tokens, or drafts, of each request; requests."""


class ReplayClock:
    """Times replays on the device; the host waits once, for all."""

    def __init__(self) -> None:
        self._marks: dict[Graph, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def time(self, graph: Graph, replay: Callable[[], object]) -> None:
        """Replays a graph a few times."""
        marks = self._marks.setdefault(graph, [])
        for _ in range(_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            marks.append((start, end))

    def seconds(self) -> dict[Graph, float]:
        """Seconds of each graph, once the device has done all."""
        torch.accelerator.synchronize()
        return {
            graph: median(start.elapsed_time(end) for start, end in marks) * 1e-3
            for graph, marks in self._marks.items()
        }


@torch.inference_mode()
def time_graphs(runner: Any) -> dict[Graph, float]:
    """Replays the target's and the draft's graphs of a `TreeRunner`'s decode steps."""
    clock, target, speculator = ReplayClock(), runner.cudagraph_manager, runner.speculator
    for shape in filter(is_timed, list(target.graphs)):
        _prepare(runner, shape)
        clock.time(_graph("target", shape), partial(target.run_fullgraph, shape))
    batch = speculator.batch
    batch.slots.fill_(-1)
    batch.modes.fill_(GREEDY)  # nothing is drawn for padding
    for kind, held in speculator.graphs.items():
        for shape in filter(is_timed, list(held.graphs)):
            clock.time(_graph(kind, shape), partial(held.run_fullgraph, shape))
    batch.modes.fill_(SKIP)
    speculator.drafted.tokens.zero_()
    return clock.seconds()


def _graph(kind: str, shape: BatchExecutionDescriptor) -> Graph:
    return kind, shape.uniform_token_count or 0, shape.num_reqs or 0


def is_timed(shape: BatchExecutionDescriptor) -> bool:
    """Whether a graph is of decode steps, without adapters and long contexts."""
    is_full = type(shape) is BatchExecutionDescriptor and shape.cg_mode == CUDAGraphMode.FULL
    return is_full and shape.uniform_token_count is not None and not shape.num_active_loras


def _prepare(runner: Any, shape: BatchExecutionDescriptor) -> None:
    """Fills the target's inputs as before a capture, but with many tokens, none of them padding."""
    buffers, rows = runner.input_buffers, shape.num_tokens
    prepare_inputs_to_capture(
        shape.num_reqs or 0, rows, runner.model_state, buffers, runner.block_tables,
        runner.attn_groups, runner.kv_cache_config, full_cudagraph=True,
        max_query_len=shape.uniform_token_count,
    )  # fmt: skip
    places = torch.arange(rows, device=buffers.input_ids.device)
    buffers.input_ids[:rows] = places * _APART % runner.vocab_size
    buffers.is_padding[:rows] = False  # a mixture computes nothing for padding


def decode_times(seconds: Mapping[Graph, float], levels: Sequence[int]) -> list[Timed]:
    """Adds up the graphs of each kind of decode step that has all of them.

    ``levels`` are the depths of trees of 0, 1, 2, ... drafts: a draft reads as many tokens and one.
    """

    def smallest(kind: str, each: int, most: int, requests: int) -> float:
        """Seconds of the smallest graph that fits; 0: there are none of its kind."""
        found = [(graph, took) for graph, took in seconds.items() if graph[0] == kind]
        fitting = [(g, took) for g, took in found if each <= g[1] <= most and g[2] >= requests]
        return min(fitting)[1] if fitting else inf if found else 0.0

    found = []
    targets = {(each - 1, batch) for kind, each, batch in seconds if kind == "target"}
    growth = {(drafts, batch) for kind, drafts, batch in seconds if kind == "growth"}
    for drafts, requests in sorted(targets | growth):
        took = smallest("target", drafts + 1, drafts + 1, requests)
        if drafts > 0:
            took += smallest("read", levels[drafts] + 1, levels[-1] + 1, requests)
            dynamic = smallest("dynamic growth", drafts, drafts, requests)
            is_dynamic = 0.0 < dynamic < inf
            took += dynamic if is_dynamic else smallest("growth", drafts, drafts, requests)
        else:
            took += smallest("keys", 1, 1, requests)
        if took < inf:
            found.append((drafts, requests, took))
    return found
