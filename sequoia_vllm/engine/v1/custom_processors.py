"""Logits processors of the engine's user on tree nodes, see `eligibility.follows_trees`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, AdapterLogitsProcessor

from sequoia_vllm.engine.core.eligibility import wraps_callables


def of_user(processors: Iterable[Any]) -> list[Any]:
    """The processors that are not vLLM's own."""
    return [one for one in processors if type(one) not in BUILTIN_LOGITS_PROCESSORS]


def change(processors: Sequence[Any], request: int) -> bool:
    """Whether any of these changes the logits of the request in this row of the batch."""
    return any(not wraps_callables(type(one)) or request in one.req_info for one in processors)


def run_on_nodes(
    processors: Sequence[Any],
    logits: Tensor,
    requests: Sequence[int],
    paths: Sequence[Sequence[int]],
    num_reqs: int,
) -> None:
    """Runs processors of the user's, in their order, on nodes of trees.

    Args:
        logits: float32 ``[M, V]``, changed in place.
        requests: Each node's request: its row in a batch of ``num_reqs``.
        paths: Tokens from the root's child down to each node itself.
    """
    for one in processors:
        if wraps_callables(type(one)):
            _call(one, logits, requests, paths)
        else:
            _run_in_batches(one, logits, requests, num_reqs)


def _call(
    adapter: AdapterLogitsProcessor,
    logits: Tensor,
    requests: Sequence[int],
    paths: Sequence[Sequence[int]],
) -> None:
    """Replaces its `apply`: each request's callable is told what was generated, and the path."""
    for row, (request, path) in enumerate(zip(requests, paths, strict=True)):
        if (of_request := adapter.req_info.get(request)) is not None:
            *before, output = of_request.args
            logits[row] = of_request.func(
                *before, [*output, *path], logits[row], **of_request.keywords
            )


def _run_in_batches(processor: Any, logits: Tensor, requests: Sequence[int], num_reqs: int) -> None:
    """Calls its `apply` as for batches: one row for each request, as often as one has a node."""
    before: Counter[int] = Counter()
    turns = []  # of each node: how many nodes of its request came before
    for request in requests:
        turns.append(before[request])
        before[request] += 1
    for turn in range(max(turns, default=-1) + 1):
        rows = [row for row, own in enumerate(turns) if own == turn]
        places = [requests[row] for row in rows]
        batch = logits.new_zeros(num_reqs, logits.shape[1])
        batch[places] = logits[rows]
        logits[rows] = processor.apply(batch)[places]
